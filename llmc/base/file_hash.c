#include "llmc/base/file_hash.h"
#include "llmc/base/command.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { PATIENCE_SECONDS = 60, HEX_DIGITS = 64 };

struct FileHash {
    pthread_t thread;
    bool running;
    char *path, *output; // owned; output: what sha256sum printed, NULL: nothing of use
};

static void *hash_file(void *argument)
{
    FileHash *hash = argument;
    bool late;
    char *const command[] = {"sha256sum", "--", hash->path, NULL};
    hash->output = command_output(command, PATIENCE_SECONDS, &late);
    return NULL;
}

FileHash *file_hash_start(const char *path)
{
    FileHash *hash = xcalloc(1, sizeof *hash);
    hash->path = format_string("%s", path);
    hash->running = pthread_create(&hash->thread, NULL, hash_file, hash) == 0;
    return hash;
}

char *file_hash_finish(FileHash *hash)
{
    if (!hash)
        return NULL;
    if (hash->running)
        pthread_join(hash->thread, NULL);
    // A line begins with a backslash where the file's name has characters that sha256sum escapes.
    const char *text = hash->output ? hash->output + (hash->output[0] == '\\') : "";
    bool good = strspn(text, "0123456789abcdef") == HEX_DIGITS && text[HEX_DIGITS] == ' ';
    char *digits = good ? format_string("%.*s", HEX_DIGITS, text) : NULL;
    free(hash->output);
    free(hash->path);
    free(hash);
    return digits;
}
