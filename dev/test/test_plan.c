// The plan of activations and scratch: no two tensors that are alive at once share a byte, and the full-size
// network takes no more than the op with the most tensors needs.
#include "dev/test/tap.h"
#include "llmc/dist/comm.h"
#include "llmc/model/model.h"
#include <stdlib.h>

static Plan plan;

static void describe(Model *m, Config *c, const char *preset)
{
    Error e;
    char *argv[] = {"test", "--preset", (char *)preset, "--vocab-size", "50257"};
    if (!config_parse(c, 5, argv, &e))
        fatal(EXIT_USAGE, "%s", e.text);
    model_describe(m, c);
}

static bool alive_together(int i, int k)
{
    return plan.tensor[i].first <= plan.tensor[k].last && plan.tensor[k].first <= plan.tensor[i].last;
}

static bool apart(int i, int k)
{
    size_t a = plan.tensor[i].offset, b = plan.tensor[k].offset;
    return a + plan.tensor[i].bytes <= b || b + plan.tensor[k].bytes <= a;
}

static void check_plan(const Model *m, const char *preset, int N, bool backward)
{
    acts_plan(&plan, m, N, backward);
    int used = 0, clashes = 0, outside = 0, crooked = 0, shared = 0;
    for (int i = 0; i < plan.count; i++) {
        if (plan.tensor[i].last < 0)
            continue;
        used++;
        outside += plan.tensor[i].offset + plan.tensor[i].bytes > plan.size;
        crooked += plan.tensor[i].offset % 256 != 0;
        for (int k = 0; k < i; k++) {
            if (plan.tensor[k].last < 0)
                continue;
            clashes += alive_together(i, k) && !apart(i, k);
            shared += !apart(i, k);
        }
    }
    ok(used > 20 && !clashes && !outside && !crooked,
       "%s, %d tokens, %s: %d tensors in %d ops, %d pairs share memory and none at the same time", preset, N,
       backward ? "training" : "forward only", used, plan.ops, shared);
    ok(shared > used / 2, "and memory is used again");
}

static double mib(size_t bytes) { return (double)bytes / 1048576; }

static void check_full_size(const Model *m, const char *preset, int N, bool backward, double limit)
{
    int op;
    acts_plan(&plan, m, N, backward);
    size_t alive = plan_most_alive(&plan, &op);
    ok(mib(plan.size) <= limit && alive <= plan.size,
       "%s: %s of %d tokens takes %.1f MiB of %.1f; %.1f are alive at the worst op", preset,
       backward ? "training" : "validation", N, mib(plan.size), limit, mib(alive));
}

int main(void)
{
    static Model m;
    Config c;
    comm_open();
    backend_open(0);
    for (int i = 0; records[i]; i++) {
        describe(&m, &c, records[i]->name);
        PART(check_plan(&m, records[i]->name, 512, true));
        PART(check_plan(&m, records[i]->name, 512, false));
        PART(check_plan(&m, records[i]->name, 48, true));
    }
    describe(&m, &c, "2025-10-27");
    PART(check_full_size(&m, "2025-10-27", 32768, true, 6409.5));
    PART(check_full_size(&m, "2025-10-27", 262144, false, 4608.5));
    describe(&m, &c, "2025-11-18");
    PART(check_full_size(&m, "2025-11-18", 32768, true, 6409.5));
    PART(check_full_size(&m, "2025-11-18", 262144, false, 3456.5));
    describe(&m, &c, "2026-07-17");
    PART(check_full_size(&m, "2026-07-17", 49152, true, 12464));
    PART(check_full_size(&m, "2026-07-17", 262144, false, 5047.5));
    describe(&m, &c, "2026-08-06");
    PART(check_full_size(&m, "2026-08-06", 49152, true, 10880));
    PART(check_full_size(&m, "2026-08-06", 262144, false, 4663.5));
    return tap_done();
}
