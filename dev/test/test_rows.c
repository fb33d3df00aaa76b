// Rows of a table that travel: each op moves the listed rows and no other, and entries below 0 do nothing.
#include "dev/test/tap.h"
#include "llmc/ops/tables.h"

enum { ROWS = 9, WIDTH = 5, COUNT = 4 };
static const int32_t list[COUNT] = {7, -1, 0, 4};

static float table_value(int i) { return (float)(i + 1); }
static float packed_value(int i) { return (float)(-1000 - i); }

typedef struct {
    float table[ROWS * WIDTH], packed[COUNT * WIDTH];
} Moved;

static Moved start(void)
{
    Moved m;
    for (int i = 0; i < ROWS * WIDTH; i++)
        m.table[i] = table_value(i);
    for (int i = 0; i < COUNT * WIDTH; i++)
        m.packed[i] = packed_value(i);
    return m;
}

static int entry_of(int row) // of the list; -1: none
{
    for (int k = 0; k < COUNT; k++) {
        if (list[k] == row)
            return k;
    }
    return -1;
}

// What an op should leave: a listed row is `row_keeps` of itself plus `row_gets` of its entry, an entry the
// row or itself.
static void check(const char *name, const Moved *m, float row_keeps, float row_gets, bool entry_gets)
{
    bool rows = true, entries = true;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        int k = entry_of(i / WIDTH);
        float want = table_value(i);
        if (k >= 0)
            want = row_keeps * want + row_gets * packed_value(k * WIDTH + i % WIDTH);
        rows &= m->table[i] == want;
    }
    for (int i = 0; i < COUNT * WIDTH; i++) {
        int row = list[i / WIDTH];
        bool moves = entry_gets && row >= 0;
        entries &= m->packed[i] == (moves ? table_value(row * WIDTH + i % WIDTH) : packed_value(i));
    }
    ok(rows && entries, "%s", name);
}

int main(void)
{
    Moved m = start();
    rows_load(NULL, m.packed, m.table, list, COUNT, WIDTH * (int)sizeof(float));
    check("rows_load", &m, 1, 0, true);
    m = start();
    rows_store(NULL, m.table, m.packed, list, COUNT, WIDTH * (int)sizeof(float));
    check("rows_store", &m, 0, 1, false);
    m = start();
    rows_take(NULL, m.packed, m.table, list, COUNT, WIDTH);
    check("rows_take", &m, 0, 0, true);
    m = start();
    rows_add(NULL, m.table, m.packed, list, COUNT, WIDTH);
    check("rows_add", &m, 1, 1, false);
    return tap_done();
}
