#include "llmc/dist/row_exchange.h"
#include "llmc/ops/tables.h"
#include <stdlib.h>
#include <string.h>

enum {
    STEPS_OF_SIZE = 32
}; // sizes of chunks are multiples of so much of the largest: few graphs are captured

void row_exchange_create(RowExchange *x, const Params *p, PairExchange how)
{
    const Param *a = params_of(p, ROLE_BIGRAM, 0);
    *x = (RowExchange){.param = -1, .size = comm_size()};
    if (how == EXCHANGE_DENSE || !a || x->size == 1 || a->spec->sharding != SHARD_ROWS)
        return;
    if (a->rows % x->size && how == EXCHANGE_AUTO)
        return;
    if (a->rows % x->size)
        fatal(EXIT_USAGE, "--pair-exchange rows: the %lld rows of %s cannot be split over %d ranks",
              (long long)a->rows, a->name, x->size);
    x->param = (int)(a - p->list);
    x->share = a->rows / x->size;
    x->width = (int)a->cols;
    x->most = (int)max_i64(1, x->share / 2);
    size_t rows = (size_t)x->size * (size_t)x->most, bytes = rows * (size_t)x->width * sizeof(float);
    x->asked = device_alloc(rows * sizeof *x->asked, "exchange: rows");
    x->outgoing = device_alloc(bytes, "exchange: rows");
    x->incoming = device_alloc(bytes, "exchange: rows");
}

void row_exchange_free(RowExchange *x)
{
    if (x->param < 0)
        return;
    device_free(x->asked);
    device_free(x->outgoing);
    device_free(x->incoming);
}

void row_exchange_warm_up(const RowExchange *x, Stream s)
{
    if (x->param >= 0)
        comm_all_to_all(s, x->incoming, x->outgoing, (int64_t)sizeof(float));
}

void row_exchange_gradients(const RowExchange *x, float *grad, Stream s)
{
    int chunk = x->now.num_gradients, all = x->size * chunk;
    int64_t elements = (int64_t)chunk * x->width;
    comm_all_to_all(s, x->asked, x->now.gradients, chunk * (int64_t)sizeof(int32_t));
    rows_take(s, x->outgoing, grad, x->now.gradients, all, x->width);
    comm_all_to_all(s, x->incoming, x->outgoing, elements * (int64_t)sizeof(float));
    for (int r = 0; r < x->size; r++)
        rows_add(s, grad, (float *)x->incoming + r * elements, x->asked + (int64_t)r * chunk, chunk,
                 x->width);
}

void row_exchange_values(const RowExchange *x, floatX *values, Stream s)
{
    int chunk = x->now.num_values, all = x->size * chunk, row = x->width * (int)sizeof(floatX);
    comm_all_to_all(s, x->asked, x->now.values, chunk * (int64_t)sizeof(int32_t));
    rows_load(s, x->outgoing, values, x->asked, all, row);
    comm_all_to_all(s, x->incoming, x->outgoing, (int64_t)chunk * row);
    rows_store(s, values, x->incoming, x->now.values, all, row);
}

// ---- the lists --------------------------------------------------------------------------------------------

void row_marks_create(RowMarks *m, const RowExchange *x)
{
    *m = (RowMarks){0};
    if (x->param < 0)
        return;
    m->rows = x->share * x->size;
    m->share = x->share;
    m->read = xcalloc((size_t)m->rows, 1);
    m->summed = xcalloc((size_t)m->rows, 1);
}

void row_marks_free(RowMarks *m)
{
    free(m->read);
    free(m->summed);
}

void row_marks_begin(RowMarks *m, bool fresh)
{
    if (!m->rows)
        return;
    memset(m->read, 0, (size_t)m->rows);
    if (!fresh)
        return;
    memset(m->summed, 0, (size_t)m->rows);
    m->known = true;
}

void row_marks_add(RowMarks *m, const int32_t *rows, int count)
{
    for (int i = 0; i < count && m->rows; i++)
        m->read[rows[i]] = m->summed[rows[i]] = 1;
}

// The most rows that any rank has of one owner.
static int64_t fullest(const RowMarks *m, const uint8_t *marked)
{
    int64_t most = 0;
    for (int64_t first = 0; first < m->rows; first += m->share) {
        int64_t count = 0;
        for (int64_t i = first; i < first + m->share; i++)
            count += marked[i];
        most = max_i64(most, count);
    }
    return comm_max(most);
}

static int chunk_size(const RowExchange *x, int before, int64_t needed)
{
    int64_t step = max_i64(1, x->most / STEPS_OF_SIZE);
    int64_t size = min_i64(x->most, round_up(max_i64(1, needed), step));
    return needed > x->most ? 0 : (int)max_i64(before, size);
}

void row_marks_agree(RowMarks *m, const RowExchange *x, bool update, RowLists *lists)
{
    *lists = (RowLists){0};
    if (!m->rows)
        return;
    lists->num_values = chunk_size(x, m->num_values, fullest(m, m->read));
    m->num_values = (int)max_i64(m->num_values, lists->num_values);
    if (!update || !m->known)
        return;
    lists->num_gradients = chunk_size(x, m->num_gradients, fullest(m, m->summed));
    m->num_gradients = (int)max_i64(m->num_gradients, lists->num_gradients);
}

// skipped: an owner whose chunk stays empty; -1: none
static void list(const RowMarks *m, const uint8_t *marked, int chunk, int skipped, int32_t *host)
{
    for (int64_t owner = 0; owner < m->rows / m->share; owner++) {
        int32_t *to = host + owner * chunk, *end = to + chunk;
        for (int64_t i = owner * m->share; i < (owner + 1) * m->share && owner != skipped; i++) {
            if (marked[i])
                *to++ = (int32_t)i;
        }
        while (to < end)
            *to++ = -1;
    }
}

void row_marks_list(const RowMarks *m, const RowLists *lists, int rank, int32_t *host)
{
    if (lists->num_values)
        list(m, m->read, lists->num_values, rank, host);
    if (lists->num_gradients)
        list(m, m->summed, lists->num_gradients, -1, host + m->rows / m->share * lists->num_values);
}

int64_t row_marks_ints(const RowExchange *x) { return x->param < 0 ? 0 : (int64_t)2 * x->size * x->most; }
