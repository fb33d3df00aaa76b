// Any bytes as a run file: it is refused with one line that begins with the name of the file, or every
// argument that it gives is an option with a value that the option takes.
#include "llmc/run/config_file.h"
#include <stdlib.h>
#include <string.h>

static void check(bool good)
{
    if (!good)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Arguments all = {0};
    Error e = {""};
    char *text = xcalloc(size + 1, 1); // exactly as long, so that reading past the end is seen
    if (size)
        memcpy(text, data, size);
    if (!config_file_parse(&all, "run.toml", text, size, &e))
        check(!strncmp(e.text, "run.toml:", 9) && !strchr(e.text, '\n'));
    for (int i = 0; i < all.argc; i++) {
        char *name = xstrdup(all.argv[i] + 2), *value = strchr(name, '=');
        static Config c;
        *value++ = 0;
        check(config_set(&c, name, value, &e));
        free(name);
    }
    check(!all.argc || !all.argv[all.argc]);
    arguments_free(&all);
    free(text);
    return 0;
}
