// The cache of the self-check, without a GPU: what is remembered, for whom, and where nothing is.
#include "dev/test/tap.h"
#include "llmc/cuda/device/check_cache.c"
#include <dirent.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { RANKS = 8, ROUNDS = 50 };
static char folder[] = "/tmp/test_check_cache_XXXXXX";
static const CheckKey usual = {"GPU of a test 0123", "attention 6 heads", "abcdef", "driver 1.2.3"};

// A folder below `folder`, which lives as long as the program.
static char *below(const char *name) { return format_string("%s/%s", folder, name); }

static void use(const char *xdg, const char *home)
{
    xdg ? setenv("XDG_CACHE_HOME", xdg, 1) : unsetenv("XDG_CACHE_HOME");
    home ? setenv("HOME", home, 1) : unsetenv("HOME");
}

// Files in a folder; -1: it is not there.
static int files_in(const char *path)
{
    DIR *d = opendir(path);
    int count = d ? 0 : -1;
    for (struct dirent *e; d && (e = readdir(d));)
        count += e->d_name[0] != '.';
    if (d)
        closedir(d);
    return count;
}

static bool remembered(const CheckKey *key) { return !check_needed(SELF_CHECK_AUTO, key); }

static void test_modes(void)
{
    use(below("modes"), NULL);
    ok(check_needed(SELF_CHECK_AUTO, &usual), "the first time it runs");
    ok(check_needed(SELF_CHECK_AUTO, &usual), "a check that did not pass is not remembered");
    ok(!check_needed(SELF_CHECK_NEVER, &usual), "never");
    check_remember(&usual);
    ok(remembered(&usual), "a pass is remembered");
    ok(remembered(&usual), "and stays so");
    ok(files_in(below("modes/train_gpt")) == 1, "in one file");
    ok(check_needed(SELF_CHECK_ALWAYS, &usual), "always");
    ok(!remembered(&usual), "a check that runs again and does not pass is forgotten");
}

static void test_keys(void)
{
    CheckKey other[] = {usual, usual, usual, usual};
    const char *const names[] = {"GPU", "set of checks", "program", "driver"};
    other[0].gpu = "GPU of a test 4567";
    other[1].checks = "attention 12 heads";
    other[2].program = "abcdee";
    other[3].driver = "driver 1.2.4";
    for (int i = 0; i < 4; i++) {
        char *name = format_string("keys%d", i);
        use(below(name), NULL);
        check_remember(&usual);
        bool apart = check_needed(SELF_CHECK_AUTO, &other[i]);
        ok(apart, "another %s is checked", names[i]);
        check_remember(&other[i]);
        ok(remembered(&other[i]), "another %s is remembered", names[i]);
        ok(remembered(&usual) == (i < 2), "another %s %s", names[i],
           i < 2 ? "has a file of its own" : "replaces the first");
        free(name);
    }
    const char *const *fields[] = {&other[0].gpu, &other[1].checks, &other[2].program, &other[3].driver};
    use(below("unknown"), NULL);
    for (int i = 0; i < 4; i++) {
        *(const char **)fields[i] = NULL;
        check_remember(&other[i]);
        ok(!remembered(&other[i]), "an unknown %s: checked every time", names[i]);
    }
    ok(files_in(below("unknown/train_gpt")) <= 0, "and nothing is written");
}

static void test_folders(void)
{
    use(NULL, below("home"));
    check_remember(&usual);
    ok(remembered(&usual) && files_in(below("home/.cache/train_gpt")) == 1, "~/.cache/train_gpt");
    use("relative", below("home"));
    ok(remembered(&usual), "a relative XDG_CACHE_HOME does not count");
    use("", below("home"));
    ok(remembered(&usual), "nor an empty one");
    use(NULL, NULL);
    check_remember(&usual);
    ok(!remembered(&usual), "no home: checked every time");
    use(NULL, "relative");
    check_remember(&usual);
    ok(!remembered(&usual) && access("relative", F_OK), "a home that is no absolute path, too");
    use("/proc/self", NULL);
    check_remember(&usual);
    ok(!remembered(&usual), "a folder that cannot be made, too");
    FILE *f = fopen(below("file"), "w");
    if (f)
        fclose(f);
    use(below("file"), NULL);
    check_remember(&usual);
    ok(!remembered(&usual), "a file in the place of the folder, too");
}

static void test_contents(void)
{
    use(below("contents"), NULL);
    check_remember(&usual);
    char *path = file_of(&usual, below("contents/train_gpt"));
    struct stat info;
    bool there = stat(path, &info) == 0;
    ok(there && truncate(path, info.st_size - 1) == 0 && !remembered(&usual),
       "a file cut short does not count");
    ok(access(path, F_OK) != 0, "and is removed");
    check_remember(&usual);
    FILE *f = fopen(path, "a");
    if (f)
        fputs("more\n", f);
    if (f)
        fclose(f);
    ok(!remembered(&usual), "nor does a longer one");
    ok(mkfifo(path, 0600) == 0 && !remembered(&usual), "a FIFO does not keep the program waiting");
    free(path);
}

// Ranks of one machine write and read the same file: nobody ever sees a part of it or leaves a second one.
static void test_ranks(void)
{
    use(below("ranks"), NULL);
    check_remember(&usual);
    char *path = file_of(&usual, below("ranks/train_gpt")), *text = text_of(&usual);
    int failed = 0, status;
    fflush(stdout);
    for (int rank = 0; rank < RANKS; rank++) {
        if (fork())
            continue;
        bool good = true;
        for (int i = 0; i < ROUNDS; i++) {
            check_remember(&usual);
            good = good && file_holds(path, text);
        }
        _exit(!good);
    }
    while (wait(&status) > 0)
        failed += status != 0;
    ok(failed == 0, "%d ranks: the file is complete at any time", RANKS);
    ok(files_in(below("ranks/train_gpt")) == 1, "and the only one");
    free(path);
    free(text);
}

static void test_names(void)
{
    const char *id = program_build_id();
    ok(id && strlen(id) >= 16 && strspn(id, "0123456789abcdef") == strlen(id), "the build id: %s",
       id ? id : "none");
    char *command = format_string("readelf -n /proc/%d/exe 2>/dev/null | grep -q 'Build ID: %s$'",
                                  (int)getpid(), id ? id : "none");
    ok(system(command) == 0, "is the one that readelf finds");
    free(command);
    FILE *f = fopen(below("version"), "w");
    if (f)
        fputs("NVRM version: NVIDIA UNIX x86_64 Kernel Module  1.2.3\nGCC version: 4\n", f);
    if (f)
        fclose(f);
    const char *driver = driver_version(below("version"));
    ok(driver && strstr(driver, "1.2.3") && !strchr(driver, '\n'), "the driver: the first line");
    ok(!driver_version(below("none")), "no driver");
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    PART(test_modes());
    PART(test_keys());
    PART(test_folders());
    PART(test_contents());
    PART(test_ranks());
    PART(test_names());
    char *command = format_string("rm -rf %s", folder);
    int failed = system(command);
    free(command);
    return tap_done() || failed;
}
