// A variant of Newton-Schulz as --ns gives it without other options.
#pragma once
#include "llmc/optim/newton_schulz.h"

static inline NsOptions ns_options_default(NsVariant variant)
{
    NsOptions o;
    Error e;
    NsText text = {.variant = ns_variant_name(variant)};
    if (!ns_options_parse(&o, &text, &e))
        fatal(EXIT_BAD_INPUT, "%s", e.text);
    return o;
}
