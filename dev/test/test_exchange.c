// The table of what ranks send: everything once, at the stage where it is complete, for every number of ranks
// and both topologies.
#include "dev/test/tap.h"
#include "llmc/dist/exchange.h"
#include <string.h>

// Whether the stage (0 the embedding, 1 + i layer i, then the head) uses this matrix or table. Written from
// the names, and from what the network is known to be, not from the table's own rules.
static bool uses(int stage, const Param *a)
{
    static const int value_embeds[13] = {[2] = 1, [3] = 2, [10] = 0, [11] = 1, [12] = 2};
    char prefix[32];
    snprintf(prefix, sizeof prefix, "blocks.%d.", stage - 1);
    if (a->spec->sharding == SHARD_TENSORS)
        return !strncmp(a->name, prefix, strlen(prefix));
    if (!strcmp(a->name, "embed.weight"))
        return stage == 0;
    if (!strcmp(a->name, "lm_head.weight"))
        return stage == 13;
    bool any = stage == 2 || stage == 3 || (stage >= 10 && stage <= 12);
    return any && value_embeds[stage] == a->name[strlen("value_embeds.")] - '0';
}

static bool holds(const Exchange *x, const Bucket *b, const Param *a)
{
    return b->pool == a->pool && a->offset >= b->offset && a->offset < b->offset + x->size * b->share;
}

static int lowest_use(const Exchange *x, const Bucket *b, const Params *p)
{
    for (int stage = 0; stage < x->num_stages; stage++) {
        for (int k = 0; k < p->count; k++) {
            if (holds(x, b, &p->list[k]) && uses(stage, &p->list[k]))
                return stage;
        }
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
    bool good = config_parse(&c, 5, argv, &e), even = true;
    params_describe(&p, &c);
    exchange_plan(&x, &p, size - 1, size);
    for (int k = 0; k < p.count; k++) {
        const Param *a = &p.list[k];
        int times = 0;
        for (int i = 0; i < x.count; i++)
            times += holds(&x, &x.list[i], a);
        good &= times == (size > 1 && a->spec->sharding != REPLICATED);
        even &= a->spec->sharding != SHARD_ROWS || a->rows % size == 0;
    }
    ok(good, "%s, %d ranks: every matrix and table is in one bucket", preset, size);
    int right = 0, falling = 0;
    for (int i = 0; i < x.count; i++) {
        const Bucket *b = &x.list[i];
        int stage = lowest_use(&x, b, &p);
        right += stage < 0 || stage == b->stage;
        falling += !i || b->stage <= x.list[i - 1].stage;
        printf("# stage %2d: %s at %lld\n", b->stage, b->rows ? "rows" : "slots", (long long)b->offset);
    }
    ok(right == x.count && falling == x.count,
       "and goes when its lowest layer is done, in falling order (%d buckets)", x.count);
    for (int i = 0; i < p.num_pools; i++)
        even &= !p.pools[i].slot || p.pools[i].size / p.pools[i].slot % size == 0;
    ok(even, "tables and slots divide evenly");
}

int main(void)
{
    for (int size = 1; size <= 8; size *= 2) {
        PART(test_plan("2025-10-27", size));
        PART(test_plan("2025-11-18", size));
    }
    return tap_done();
}
