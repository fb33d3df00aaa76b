// Stages of the records of July and August 2026.
#include "llmc/records/schedule_2026.h"

// Windows in blocks of 128 tokens. The weights of further targets and of the prefix term fall to 0 within a
// stage; the last scheduled one and the extension predict the next token alone.
const StageSpec stages_2026[STAGES_2026] = {
    {.window = 3, .window_short = 1, .micro_batch_tokens = 16384, .max_document = 896, .rate = 1,
     .targets = "1:0.5:0.25-0", .prefix = "0.25"},
    {.window = 7, .window_short = 3, .micro_batch_tokens = 32768, .max_document = 2048, .rate = 1.52,
     .targets = "1:0.5-0", .prefix = "0.25-0"},
    {.window = 11, .window_short = 5, .micro_batch_tokens = 49152, .max_document = 2048, .rate = 1.73},
    {.window = 13, .window_short = 6, .micro_batch_tokens = 49152, .max_document = 2048, .rate = 1.73},
};
