// The plan of activations: no two tensors that are alive at once share a byte, what is alive while the head
// runs stays out of the head's memory, and the full-size network takes no more than it did when its memory
// was laid out by hand.
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
    return plan.tensor[i].region != plan.tensor[k].region || a + plan.tensor[i].bytes <= b ||
           b + plan.tensor[k].bytes <= a;
}

static void check_plan(const Model *m, const char *preset, int N, bool backward)
{
    acts_plan(&plan, m, N, backward);
    int used = 0, clashes = 0, lent_while_busy = 0, outside = 0, crooked = 0, shared = 0;
    for (int i = 0; i < plan.count; i++) {
        if (plan.tensor[i].last < 0)
            continue;
        used++;
        bool busy = plan.busy_last >= 0 && plan.tensor[i].first <= plan.busy_last &&
                    plan.tensor[i].last >= plan.busy_first;
        lent_while_busy += busy && plan.tensor[i].region == LENT;
        outside += plan.tensor[i].offset + plan.tensor[i].bytes > plan.size[plan.tensor[i].region];
        crooked += plan.tensor[i].offset % 256 != 0;
        for (int k = 0; k < i; k++) {
            if (plan.tensor[k].last < 0)
                continue;
            clashes += alive_together(i, k) && !apart(i, k);
            shared += !apart(i, k);
        }
    }
    ok(used > 20 && !clashes && !lent_while_busy && !outside && !crooked,
       "%s, %d tokens, %s: %d tensors in %d ops, %d pairs share memory and none at the same time", preset, N,
       backward ? "training" : "forward only", used, plan.ops, shared);
    ok(shared > used / 2 && (backward || !plan.size[LENT]), "and memory is used again");
    ok((plan.busy_last >= 0) == backward, "the head's memory is lent in training only");
}

// Bytes alive at the worst op: no plan can do with less.
static size_t most_alive(void)
{
    size_t most = 0;
    for (int op = 0; op < plan.ops; op++) {
        size_t sum = 0;
        for (int i = 0; i < plan.count; i++) {
            if (plan.tensor[i].first <= op && op <= plan.tensor[i].last)
                sum += plan.tensor[i].bytes;
        }
        most = sum > most ? sum : most;
    }
    return most;
}

static double mib(size_t bytes) { return (double)bytes / 1048576; }

static void check_full_size(const Model *m, const char *preset, double training, double lent, double forward)
{
    acts_plan(&plan, m, 32768, true);
    ok(mib(plan.size[OWN]) <= training && mib(plan.size[LENT]) <= lent,
       "%s: training on 32768 tokens takes %.1f MiB of %.1f, and %.1f of %.1f that are lent", preset,
       mib(plan.size[OWN]), training, mib(plan.size[LENT]), lent);
    ok(most_alive() <= plan.size[OWN] + plan.size[LENT], "%.1f MiB are alive at the worst op",
       mib(most_alive()));
    acts_plan(&plan, m, 262144, false);
    ok(mib(plan.size[OWN]) <= forward && most_alive() <= plan.size[OWN],
       "%s: validation on 262144 tokens takes %.1f MiB of %.1f; %.1f are alive at the worst op", preset,
       mib(plan.size[OWN]), forward, mib(most_alive()));
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
    // As laid out by hand: 6217.4 MiB and 432.8 lent; forward 5397.0 and 3861.0.
    describe(&m, &c, "2025-10-27");
    PART(check_full_size(&m, "2025-10-27", 6217.5, 288.5, 4608.5));
    describe(&m, &c, "2025-11-18");
    PART(check_full_size(&m, "2025-11-18", 6217.5, 288.5, 3456.5));
    return tap_done();
}
