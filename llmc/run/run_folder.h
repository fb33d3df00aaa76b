// The folder of a run, <out>/<date>_<preset>_<id>/: every run has its own, so that none overwrites the files
// of another.
//
//   <uuid>.txt, <uuid>.jsonl   logs; a run that is resumed adds a pair: a log says what one process did
//   step_000123.safetensors    checkpoints
//   run.toml                   options of the process that made the folder: --config with this file repeats
//   it run_000123.toml            of one that went on here after step 123
//
// The id is the first 8 hexadecimal digits of the uuid of every log in the folder. Older programs wrote into
// <out> itself (<out>/step_000123.safetensors, <out>/logs/): such a folder can be resumed, and the run goes
// on in a run folder inside.
#pragma once
#include "llmc/base/common.h"

enum { UUID_CHARS = 36 };

typedef struct {
    char *parent; // where the run folder is made; NULL for a run that goes on in its folder. Owned
    char *path;   // the run folder; NULL until it is there. Owned
    char uuid[UUID_CHARS + 1]; // of this process's logs; on rank 0
    int lock;                  // descriptor of the folder, while this process writes there; -1: none
} RunFolder;

// "<folder>/step_000123.safetensors"; owned by the caller.
char *checkpoint_path(const char *folder, int step);

// The checkpoint that --resume names, owned by the caller; NULL with an Error when there is none.
//   a file            itself
//   a run folder      that of the highest step; a note says when another one is younger
//   any other folder  that of the run whose checkpoint was written last, among the run folders in it and the
//                     checkpoints that lie there directly
// wait: two seconds for processes that go on with these runs: one that was just ended saves a checkpoint.
char *checkpoint_find(const char *given, bool wait, Error *e);

// Whether a log beside this checkpoint of the last step, `steps`, has the last validation and the line with
// which logs end: nothing of the run is left to do.
bool run_folder_finished(const char *checkpoint, int steps);

// Rank 0, before anything else is begun: decides where the run writes, and proves it by writing a file there.
//   out         --out
//   out_given   on the command line: a resumed run then goes on in its own folder only when that is `out` or
//               lies in it
//   checkpoint  of the run that is resumed; NULL: a new run. Beside one that lies in no run folder, one
//               is made
// A run folder in use by another process is refused, and one whose last checkpoint is another one when the
// process before has left it. Half-written checkpoints of processes that are gone are removed.
bool run_folder_prepare(RunFolder *f, const char *out, bool out_given, const char *checkpoint, Error *e);

// Collective: rank 0, which has prepared it, makes the folder of a new run and hands the path to the others.
bool run_folder_open(RunFolder *f, const char *preset, Error *e);
// Where the options of this process belong, after so many steps of the run; owned by the caller.
char *run_folder_options(const RunFolder *f, int step);
// Bytes that its file system has free for files in it; INT64_MAX where that is not known.
int64_t run_folder_free(const RunFolder *f);
void run_folder_close(RunFolder *f);

// Removes checkpoints of earlier steps than `step`, so that with that one `keep` are left; 0 keeps all. What
// cannot be removed costs a note.
void run_folder_prune(const RunFolder *f, int step, int keep);
