// Record of 2026-08-06 (number 91): that of 2026-08-03 with fewer steps, and a last validation without tokens
// that cannot be.
#include "llmc/records/record.h"

static const Field fields[] = {
    {"num-scheduled", "1250"}, {"num-extension", "40"}, {"val-mask", "last"}, {NULL, NULL},
};

const Record record_2026_08_06 = {
    .name = "2026-08-06", .based_on = &record_2026_08_03, .fields = fields,
    .note = "record 91; not run on FineWeb",
};
