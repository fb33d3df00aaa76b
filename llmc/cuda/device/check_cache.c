#include "llmc/cuda/device/check_cache.h"
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- the key ----------------------------------------------------------------------------------------------

enum { MAX_ID = 64 };

// Looks for the build id among a segment's notes; each part of a note is padded to 4 bytes.
static bool find_id(const char *notes, size_t size, char *hex)
{
    for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= size;) {
        const ElfW(Nhdr) *n = (const ElfW(Nhdr) *)(notes + at);
        const char *name = notes + at + sizeof *n;
        const unsigned char *id = (const unsigned char *)name + round_up(n->n_namesz, 4);
        if (n->n_type == NT_GNU_BUILD_ID && n->n_namesz == 4 && !memcmp(name, "GNU", 4) &&
            n->n_descsz <= MAX_ID) {
            for (size_t i = 0; i < n->n_descsz; i++)
                sprintf(hex + 2 * i, "%02x", id[i]);
            return true;
        }
        at += sizeof *n + (size_t)(round_up(n->n_namesz, 4) + round_up(n->n_descsz, 4));
    }
    return false;
}

// dl_iterate_phdr visits the program first; 1 ends it.
static int visit_program(struct dl_phdr_info *info, size_t size, void *hex)
{
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        const char *notes = (const char *)(info->dlpi_addr + p->p_vaddr);
        if (p->p_type == PT_NOTE && find_id(notes, p->p_memsz, hex))
            break;
    }
    return 1;
}

const char *program_build_id(void)
{
    static char hex[2 * MAX_ID + 1];
    if (!hex[0])
        dl_iterate_phdr(visit_program, hex);
    return hex[0] ? hex : NULL;
}

const char *driver_version(const char *path)
{
    static char line[256];
    FILE *f = fopen(path, "r");
    bool good = f && fgets(line, sizeof line, f);
    if (f)
        fclose(f);
    if (!good)
        return NULL;
    line[strcspn(line, "\n")] = 0;
    return line[0] ? line : NULL;
}

// ---- the file ---------------------------------------------------------------------------------------------

// Owned by the caller; NULL: there is no such folder.
static char *cache_folder(void)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/')
        return format_string("%s/train_gpt", cache);
    return home && home[0] == '/' ? format_string("%s/.cache/train_gpt", home) : NULL;
}

static bool is_known(const CheckKey *k) { return k->gpu && k->checks && k->program && k->driver; }

static char *file_of(const CheckKey *k, const char *folder)
{
    uint64_t gpu = fingerprint_bytes(0, k->gpu, strlen(k->gpu) + 1);
    uint64_t both = fingerprint_bytes(gpu, k->checks, strlen(k->checks));
    return format_string("%s/self_check_%016llx.txt", folder, (unsigned long long)both);
}

static char *text_of(const CheckKey *k)
{
    return format_string("self-check passed\ngpu %s\nchecks %s\nprogram %s\ndriver %s\n", k->gpu, k->checks,
                         k->program, k->driver);
}

static bool file_holds(const char *path, const char *text)
{
    Error unused;
    int64_t bytes;
    size_t length = strlen(text);
    int fd = open_regular("cache", path, &bytes, &unused);
    if (fd < 0)
        return false;
    char *there = xcalloc(length, 1);
    bool same = bytes == (int64_t)length && read(fd, there, length) == (ssize_t)length &&
                !memcmp(there, text, length);
    free(there);
    close(fd);
    return same;
}

bool check_needed(SelfCheck mode, const CheckKey *key)
{
    char *folder = cache_folder();
    bool needed = mode != SELF_CHECK_NEVER;
    if (needed && folder && is_known(key)) {
        char *path = file_of(key, folder), *text = text_of(key);
        needed = mode == SELF_CHECK_ALWAYS || !file_holds(path, text);
        if (needed)
            unlink(path);
        free(path);
        free(text);
    }
    free(folder);
    return needed;
}

static bool write_new(int fd, const char *text)
{
    ssize_t length = (ssize_t)strlen(text);
    bool good = write(fd, text, (size_t)length) == length;
    return close(fd) == 0 && good;
}

void check_remember(const CheckKey *key)
{
    char *folder = is_known(key) ? cache_folder() : NULL;
    if (!folder)
        return;
    if (make_folders(folder) == 0) {
        char *path = file_of(key, folder), *text = text_of(key);
        char *temporary = format_string("%s.XXXXXX", path);
        int fd = mkstemp(temporary);
        if (fd >= 0 && (!write_new(fd, text) || rename(temporary, path)))
            unlink(temporary);
        free(path);
        free(text);
        free(temporary);
    }
    free(folder);
}
