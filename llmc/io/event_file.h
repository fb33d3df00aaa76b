// TensorBoard's event file, <folder>/events.out.tfevents.<seconds>.<microseconds>.<id>: numbers by step, each
// under a tag. TensorBoard reads the files of a folder in the order of their names, so a run that is resumed
// goes on in a file of its own.
//
// The file is a sequence of records (TFRecord):
//   length of the event   uint64, little-endian
//   masked CRC-32C of the length's 8 bytes, and behind the event that of its bytes: uint32, the sum rotated
//                         right by 15 bits, plus 0xa282ead8
// and an event is a protobuf message, of which these fields are written:
//   Event       1 wall_time (double, seconds of the clock)   2 step (varint)   3 file_version (string)
//               5 summary (message)   7 session_log (message)
//   Summary     1 value (message, repeated): 1 tag (string)   2 simple_value (fp32)
//   SessionLog  1 status (varint; 1: START)
// The first event of a file has the version "brain.Event:2". START says that events of this step and later
// ones in earlier files are void: a run that is resumed from a checkpoint takes those steps again.
#pragma once
#include "llmc/base/common.h"

typedef struct {
    const char *tag;
    double value;
} EventScalar;

typedef struct {
    double wall_time;
    int64_t step;
    const char *version;        // NULL: none
    const EventScalar *scalars; // (count)
    int count;
    bool start;
} Event;

// The event as a record. Owned by the caller; *bytes: its length.
uint8_t *event_encode(const Event *e, size_t *bytes);

typedef struct EventFile EventFile;

// Makes the file. id: the run's, a part of its name; first_step: 0, or the first step that a resumed run
// reports. Written as append_file.h says.
EventFile *event_file_create(const char *folder, const char *id, int64_t first_step);
void event_file_write(EventFile *f, int64_t step, const EventScalar *scalars, int count);
void event_file_close(EventFile *f);
