// Record of 2025-11-10: cautious weight decay.
#include "llmc/records/record.h"

static const Field fields[] = {{"weight-decay", "1.2"}, {"num-scheduled", "2205"}, {NULL, NULL}};

const Record record_2025_11_10 = {
    .name = "2025-11-10", .based_on = &record_2025_10_27, .fields = fields,
    .note = "records 43 and 44; not run on FineWeb",
};
