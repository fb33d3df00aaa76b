// The table of what ranks send: everything once, at the stage where it is complete, for every number of ranks and both
// topologies.
#include "dev/test/tap.h"
#include "llmc/exchange.h"
#include <string.h>

// Whether layer i of the network uses this matrix or table. Written from the names, not from the table's own rules.
static bool uses(const Config *c, int i, const Param *a)
{
    char prefix[32];
    snprintf(prefix, sizeof prefix, "blocks.%d.", i);
    if (a->group == GROUP_MATRIX) return !strncmp(a->name, prefix, strlen(prefix));
    if (!strcmp(a->name, "embed.weight")) return i == 0;
    if (!strcmp(a->name, "lm_head.weight")) return i == NUM_LAYERS;
    return i > 0 && i < NUM_LAYERS && layer_role(c, i).value_embed == a->name[strlen("value_embeds.")] - '0';
}

static bool holds(const Exchange *x, const Bucket *b, const Params *p, const Param *a)
{
    int64_t at = a->offset / (b->table ? p->table_size : p->slot_size);
    if (b->table != (a->group == GROUP_TABLE)) return false;
    return b->table ? at == b->first : at >= b->first && at < b->first + x->size;
}

static int lowest_use(const Config *c, const Exchange *x, const Bucket *b, const Params *p)
{
    for (int stage = 0; stage < NUM_STAGES; stage++)
        for (int k = 0; k < p->count; k++) {
            const Param *a = &p->list[k];
            if ((a->group == GROUP_MATRIX || a->group == GROUP_TABLE) && holds(x, b, p, a) && uses(c, stage, a)) return stage;
        }
    return -1; // padding alone
}

static void test_plan(const char *preset, int size)
{
    Config c;
    Error e;
    Params p;
    Exchange x;
    char *argv[] = {"test", "--preset", (char *)preset, "--vocab-size", "50257"};
    bool good = config_parse(&c, 5, argv, &e);
    params_describe(&p, &c);
    exchange_plan(&x, &p, &c, size - 1, size);
    for (int k = 0; k < p.count; k++) {
        const Param *a = &p.list[k];
        int times = 0;
        if (a->group != GROUP_MATRIX && a->group != GROUP_TABLE) continue;
        for (int i = 0; i < x.count; i++) times += holds(&x, &x.list[i], &p, a);
        good &= times == (size > 1);
    }
    ok(good, "%s, %d ranks: every matrix and table is in one bucket", preset, size);
    int right = 0, falling = 0;
    for (int i = 0; i < x.count; i++) {
        int stage = lowest_use(&c, &x, &x.list[i], &p);
        right += stage < 0 || stage == x.list[i].stage;
        falling += !i || x.list[i].stage <= x.list[i - 1].stage;
        printf("# stage %2d: %s %d\n", x.list[i].stage, x.list[i].table ? "table" : "slots from", x.list[i].first);
    }
    ok(right == x.count && falling == x.count, "and goes when its lowest layer is done, in falling order (%d buckets)", x.count);
    ok(p.table_size / c.model_dim % size == 0 && p.num_slots % size == 0, "tables and slots divide evenly");
}

int main(void)
{
    for (int size = 1; size <= 8; size *= 2) {
        test_plan("2025-10-27", size);
        test_plan("2025-11-18", size);
    }
    return tap_done();
}
