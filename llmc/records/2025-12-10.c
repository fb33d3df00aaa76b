// Record of 2025-12-10 (number 47): that of 2025-11-29 with the factor of v on Wq and Wk, too. The norm of q
// and k takes it away again, so these are the same numbers.
#include "llmc/records/record.h"

static const Field fields[] = {{NULL, NULL}};

const Record record_2025_12_10 = {
    .name = "2025-12-10", .based_on = &record_2025_11_29, .fields = fields,
    .note = "record 47; not run on FineWeb",
};
