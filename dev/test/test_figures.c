// dev/bench/figures.h: what --csv FILE of a bench appends.
#include "dev/bench/figures.h"
#include "dev/test/tap.h"
#include <stdlib.h>
#include <unistd.h>

static char *contents(const char *path)
{
    static char text[4096];
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = 0;
    if (f)
        fclose(f);
    return text;
}

static void open_with(const char *path)
{
    char *argv[] = {"bench_x", "--sustained", "2", "--csv", (char *)path, "fc \"backward\"", NULL};
    int argc = 6;
    figures_open(&argc, argv);
    bool taken = argc == 4 && !strcmp(argv[3], "fc \"backward\"") && !argv[4];
    ok(taken, "--csv FILE is taken out of the arguments");
}

int main(void)
{
    char path[] = "/tmp/test_figures_XXXXXX";
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    backend_open(0);
    figure("before", "", 1, "ms"); // no file yet: nothing to do
    open_with(path);
    figure("step, \"all\"", "a b", 1.5, "ms");
    figure("second\nline", "", 123456, "us");
    fclose(figures.file);
    char today[16], expected[512];
    time_t now = time(NULL);
    strftime(today, sizeof today, "%Y-%m-%d", gmtime(&now));
    char *text = contents(path), *first = strchr(text, '\n') + 1, *second = strchr(first, '\n') + 1;
    static const char head[] = "date,commit,machine,op,shape,value,unit,command\n";
    ok(!strncmp(text, head, sizeof head - 1), "the head");
    ok(!strncmp(first, today, 10), "the day");
    const char *rest = strchr(first + 11, ',');
    snprintf(expected, sizeof expected, ",1 x CPU,%s,a b,1.5,ms,%s\n", "\"step, \"\"all\"\"\"",
             "\"bench_x --sustained 2 fc \"\"backward\"\"\"");
    ok(!strncmp(rest, expected, strlen(expected)), "a row, with quotes where they are needed");
    const char *commit = first + 11;
    bool digits = strspn(commit, "0123456789abcdef+") == (size_t)(rest - commit);
    ok(digits || !strncmp(commit, "unknown", 7), "the commit");
    ok(strstr(second, ",second line,,123456,us,") != NULL, "a row is a line");
    open_with(path);
    figure("third", "", 1, "ms");
    fclose(figures.file);
    text = contents(path);
    ok(strstr(text, "third") && !strstr(text + 10, "date,commit"), "more is appended, without a second head");
    unlink(path);
    backend_close();
    return tap_done();
}
