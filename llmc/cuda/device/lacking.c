// What has no kernel yet.
#include "llmc/ops/ops.h"

bool backend_lacks(Feature f)
{
    static const bool lacks[] = {[FEATURE_NARROW_KEYS] = true};
    return lacks[f];
}
