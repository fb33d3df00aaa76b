// Documents of the cases of test_ops_gpu.c that have any.
#pragma once

static int table_slots; // of the table that was built last
enum { MOST_DOCUMENTS = 6 };

// Starts of documents in `rows` rows of `each` a token, of one row a token and of all others; returns how
// many. cu: (MOST_DOCUMENTS + 1)
static int documents_of(int rows, int each, int32_t *cu)
{
    int N = rows / each, count = 0;
    const int starts[MOST_DOCUMENTS] = {0, 1, 2 + N / 9, 3 + N / 9, N / 3, N - 1};
    for (int i = 0; i < MOST_DOCUMENTS; i++)
        if (i == 0 || (starts[i] < N && starts[i] * each > cu[count - 1]))
            cu[count++] = starts[i] * each;
    cu[count] = rows;
    return count;
}
