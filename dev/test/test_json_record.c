// JSON lines: numbers in the shortest form that reads back exactly, strings in any encoding, objects in
// objects.
#include "dev/test/tap.h"
#include "llmc/io/json_record.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static char *number(double x)
{
    size_t bytes;
    JsonRecord *r = json_record("n");
    json_number(r, "x", x);
    char *line = json_line(r, &bytes), *at = strstr(line, "\"x\":") + 4;
    char *text = format_string("%.*s", (int)strcspn(at, "}"), at);
    free(line);
    return text;
}

static void test_numbers(void)
{
    static const struct {
        double x;
        const char *text;
    } cases[] = {{0, "0"},           {1, "1"},           {100000, "100000"},
                 {262144, "262144"}, {-3, "-3"},         {0.1, "0.1"},
                 {0.008, "0.008"},   {1e-5, "1e-05"},    {1.0 / 3, "0.3333333333333333"},
                 {1e300, "1e+300"},  {5.9506, "5.9506"}, {(double)0.1f, "0.10000000149011612"},
                 {NAN, "null"},      {INFINITY, "null"}, {-INFINITY, "null"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = number(cases[i].x);
        ok(!strcmp(text, cases[i].text), "%.17g as %s", cases[i].x, text);
        free(text);
    }
    uint64_t seed = 1;
    int wrong = 0;
    for (int i = 0; i < 20000; i++) {
        double x;
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        memcpy(&x, &seed, sizeof x);
        char *text = number(x);
        wrong += isfinite(x) ? strtod(text, NULL) != x : strcmp(text, "null") != 0;
        free(text);
    }
    ok(wrong == 0, "20000 random doubles read back exactly");
}

int main(void)
{
    size_t bytes;
    PART(test_numbers());
    JsonRecord *r = json_record("options");
    json_text(r, "a\"b", "x\n\xff\xc3\xa9");
    json_begin(r, "inner");
    json_flag(r, "on", true);
    json_number(r, "n", 7);
    json_end(r);
    json_begin(r, "empty");
    json_end(r);
    json_flag(r, "off", false);
    char *line = json_line(r, &bytes);
    ok(!strcmp(line, "{\"event\":\"options\",\"a\\\"b\":\"x\\n\xef\xbf\xbd\xc3\xa9\",\"inner\":{\"on\":true,"
                     "\"n\":7},\"empty\":{},"
                     "\"off\":false}\n") &&
           bytes == strlen(line),
       "an object in an object, text in any encoding: %s", line);
    free(line);
    r = json_record(NULL);
    json_begin_list(r, "list");
    json_number(r, NULL, 1);
    json_begin(r, NULL);
    json_text(r, "a", "b");
    json_end(r);
    json_begin_list(r, NULL);
    json_end_list(r);
    json_end_list(r);
    json_flag(r, "on", true);
    line = json_line(r, &bytes);
    ok(!strcmp(line, "{\"list\":[1,{\"a\":\"b\"},[]],\"on\":true}\n"),
       "a list of a number, an object and a list: %s", line);
    free(line);
    return tap_done();
}
