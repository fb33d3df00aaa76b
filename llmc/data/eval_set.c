#include "llmc/data/eval_set.h"
#include "llmc/text/text_source.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

// ---- the list ---------------------------------------------------------------------------------------------

static const char *const task_names[EVAL_TASKS] = {"hellaswag", "lambada", "text"};

const char *eval_task_name(EvalTask task) { return task_names[task]; }

// The file's name behind "TASK=" at the start of `text`; NULL: it does not begin so.
static const char *behind_task(const char *text, EvalTask *task)
{
    for (int i = 0; i < EVAL_TASKS; i++) {
        size_t n = strlen(task_names[i]);
        if (!strncmp(text, task_names[i], n) && text[n] == '=') {
            *task = (EvalTask)i;
            return text + n + 1;
        }
    }
    return NULL;
}

// The comma that ends the entry, or the end of the list.
static const char *entry_end(const char *text)
{
    EvalTask task;
    const char *end = text + strcspn(text, ",");
    while (*end && !behind_task(end + 1, &task))
        end += 1 + strcspn(end + 1, ",");
    return end;
}

int eval_list_parse(const char *list, EvalEntry entries[MAX_EVALS], Error *e)
{
    int count = 0;
    while (*list) {
        EvalTask task = EVAL_TASKS;
        const char *path = behind_task(list, &task), *end = entry_end(path ? path : list);
        bool good = path && path < end && count < MAX_EVALS;
        if (good) {
            entries[count++] = (EvalEntry){task, format_string("%.*s", (int)(end - path), path)};
            list = *end ? end + 1 : end;
            continue;
        }
        eval_list_free(entries, count);
        if (count == MAX_EVALS)
            error_set(e, "--eval: at most %d files", MAX_EVALS);
        else
            error_set(e, "--eval '%.*s': must be hellaswag=FILE, lambada=FILE or text=FILE",
                      (int)(end - list), list);
        return -1;
    }
    return count;
}

void eval_list_free(EvalEntry *entries, int count)
{
    for (int i = 0; i < count; i++)
        free(entries[i].path);
}

// ---- texts ------------------------------------------------------------------------------------------------

typedef struct {
    EvalSet *set;
    const Tokenizer *tokenizer;
    TextEncoder *encoder;
    int longest, piece;
    TokenList context, end; // scratch
} Builder;

static int64_t bytes_of(const Tokenizer *t, const uint16_t *ids, size_t count)
{
    int64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        tokenizer_token(t, ids[i], &bytes);
        sum += (int64_t)bytes;
    }
    return sum;
}

// `context` and behind it the scored tokens.
static void add_text(Builder *b, int64_t number, const TokenList *context, const uint16_t *ids, size_t scored)
{
    EvalSet *s = b->set;
    s->texts[number] = (EvalText){.first = (int64_t)s->ids.count,
                                  .tokens = (int)(context->count + scored),
                                  .scored = (int)scored,
                                  .bytes = bytes_of(b->tokenizer, ids, scored)};
    token_list_append(&s->ids, context->ids, context->count);
    token_list_append(&s->ids, ids, scored);
}

static int64_t add_item(EvalSet *s, int64_t line, int label)
{
    if (s->count == s->capacity) {
        s->capacity = 2 * s->capacity + 64;
        s->items = xrealloc(s->items, (size_t)s->capacity, sizeof *s->items);
        s->texts = xrealloc(s->texts, (size_t)(s->capacity * s->per_item), sizeof *s->texts);
    }
    s->items[s->count] = (EvalItem){line, label};
    return s->count++;
}

// Encodes into a list that held something else.
static void encode(Builder *b, const char *text, size_t len, TokenList *list)
{
    list->count = 0;
    text_encode(b->encoder, text, len, list);
}

static bool fits(const Builder *b, const char *what, Error *e)
{
    size_t tokens = b->context.count + b->end.count;
    return tokens - 1 <= (size_t)b->longest ||
           error_set(e,
                     "%s has %zu tokens, and a batch has room for %d; raise --micro-batch-tokens "
                     "(--resume keeps it; --init-from takes the same file)",
                     what, tokens, b->longest + 1);
}

// ---- HellaSwag --------------------------------------------------------------------------------------------

// The field as it must be; NULL with a line.
static const json_t *field(const json_t *record, const char *name, json_type type, const char *what, Error *e)
{
    const json_t *value = json_object_get(record, name);
    if (value && json_typeof(value) == type)
        return value;
    error_set(e, value ? "\"%s\" is not %s" : "has no \"%s\" (%s)", name, what);
    return NULL;
}

static bool add_ending(Builder *b, int64_t item, int ending, const json_t *text, Error *e)
{
    if (!json_is_string(text))
        return error_set(e, "\"endings\" has an entry that is no string");
    char what[40], *spaced = format_string(" %s", json_string_value(text));
    encode(b, spaced, strlen(spaced), &b->end);
    free(spaced);
    snprintf(what, sizeof what, "\"ctx\" with ending %d", ending);
    if (!fits(b, what, e))
        return false;
    add_text(b, item * EVAL_ENDINGS + ending, &b->context, b->end.ids, b->end.count);
    return true;
}

static bool add_hellaswag(Builder *b, int64_t line, const json_t *record, Error *e)
{
    const json_t *ctx = field(record, "ctx", JSON_STRING, "a string", e);
    const json_t *endings = ctx ? field(record, "endings", JSON_ARRAY, "a list", e) : NULL;
    const json_t *label = endings ? field(record, "label", JSON_INTEGER, "a whole number", e) : NULL;
    if (!label)
        return false;
    json_int_t right = json_integer_value(label);
    if (json_array_size(endings) != EVAL_ENDINGS)
        return error_set(e, "\"endings\" has %zu entries, not %d", json_array_size(endings), EVAL_ENDINGS);
    if (right < 0 || right >= EVAL_ENDINGS)
        return error_set(e, "\"label\" is %lld; 0 to %d are possible", (long long)right, EVAL_ENDINGS - 1);
    encode(b, json_string_value(ctx), strlen(json_string_value(ctx)), &b->context);
    if (!b->context.count)
        return error_set(e, "\"ctx\" is empty");
    int64_t item = add_item(b->set, line, (int)right);
    for (int i = 0; i < EVAL_ENDINGS; i++) {
        if (!add_ending(b, item, i, json_array_get(endings, (size_t)i), e))
            return false;
    }
    return true;
}

static bool hellaswag_line(Builder *b, int64_t line, const char *text, size_t len, Error *e)
{
    json_error_t why;
    json_t *record = json_loadb(text, len, JSON_REJECT_DUPLICATES, &why);
    if (!record)
        return error_set(e, "is not a record of JSON: %s", why.text);
    bool good =
        json_is_object(record) ? add_hellaswag(b, line, record, e) : error_set(e, "is not one JSON object");
    json_decref(record);
    return good;
}

// ---- LAMBADA ----------------------------------------------------------------------------------------------

static bool lambada_line(Builder *b, int64_t line, const char *text, size_t len, Error *e)
{
    const char *space = memrchr(text, ' ', len);
    if (!space || space == text || space + 1 == text + len)
        return error_set(e, "\"text\" has no last word with a space before it and text before that");
    encode(b, text, (size_t)(space - text), &b->context);
    encode(b, space, (size_t)(text + len - space), &b->end);
    if (!fits(b, "\"text\"", e))
        return false;
    add_text(b, add_item(b->set, line, 0), &b->context, b->end.ids, b->end.count);
    return true;
}

// ---- any text ---------------------------------------------------------------------------------------------

// Pieces whose lengths differ by one token at most. The document is in b->end.
static void end_document(Builder *b)
{
    int64_t tokens = (int64_t)b->end.count, pieces = ceil_div(tokens, b->piece);
    uint16_t start = (uint16_t)tokenizer_document(b->tokenizer);
    TokenList document = {.ids = &start, .count = 1};
    for (int64_t i = 0; i < pieces; i++) {
        int64_t begin = tokens * i / pieces, end = tokens * (i + 1) / pieces;
        add_text(b, add_item(b->set, 0, 0), &document, b->end.ids + begin, (size_t)(end - begin));
    }
    b->end.count = 0;
}

// ---- files ------------------------------------------------------------------------------------------------

// Records of one field, the text; or whole lines.
static ChunkStatus next_text(EvalTask task, JsonlReader *r, const char **text, size_t *len, Error *e)
{
    if (task == EVAL_HELLASWAG)
        return jsonl_line(r, text, len) ? CHUNK_READ : CHUNK_NONE;
    return jsonl_next(r, text, len, e);
}

static bool add_records(Builder *b, const TextChunk *chunk, Error *e)
{
    JsonlReader r;
    const char *text;
    size_t len;
    Error why;
    ChunkStatus status;
    EvalTask task = b->set->task;
    bool good = true;
    jsonl_begin(&r, chunk);
    while (good && (status = next_text(task, &r, &text, &len, e)) != CHUNK_NONE) {
        if (status == CHUNK_ERROR) {
            good = false;
        } else if (task == EVAL_TEXT) {
            encode(b, text, len, &b->end);
            end_document(b);
        } else {
            good = (task == EVAL_HELLASWAG ? hellaswag_line : lambada_line)(b, r.line, text, len, &why);
            if (!good)
                error_set(e, "%s:%lld: %s", text_file_name(chunk->file), (long long)r.line, why.text);
        }
    }
    jsonl_end(&r);
    return good;
}

static bool read_chunks(Builder *b, TextReader *reader, Error *e)
{
    TextChunk chunk = {0};
    ChunkStatus status;
    bool good = true;
    while (good && (status = text_reader_next(reader, &chunk, e)) != CHUNK_NONE) {
        good = status == CHUNK_READ;
        if (!good)
            break;
        if (chunk.file->jsonl) {
            good = add_records(b, &chunk, e);
            continue;
        }
        if (chunk.begins_document)
            end_document(b);
        text_encode(b->encoder, chunk.bytes, chunk.len, &b->end);
    }
    if (good && b->set->task == EVAL_TEXT)
        end_document(b);
    text_chunk_free(&chunk);
    return good;
}

bool eval_set_open(EvalSet *set, const EvalEntry *entry, const Tokenizer *tokenizer, int longest, int piece,
                   Error *e)
{
    TextFileList files = {0};
    TextFormat format = entry->task == EVAL_TEXT ? FORMAT_BY_NAME : FORMAT_JSONL;
    assert(piece >= 1 && piece <= longest);
    *set = (EvalSet){.task = entry->task,
                     .path = xstrdup(entry->path),
                     .per_item = entry->task == EVAL_HELLASWAG ? EVAL_ENDINGS : 1};
    Builder b = {.set = set, .tokenizer = tokenizer, .longest = longest, .piece = piece};
    b.encoder = text_encoder_create(tokenizer);
    TextReader *reader = text_reader_create(&files, -1);
    bool good = text_files_add(&files, entry->path, format, e) && read_chunks(&b, reader, e);
    if (good && !set->count)
        good = error_set(e, "%s: holds no text", entry->path);
    text_reader_free(reader);
    text_files_free(&files);
    text_encoder_free(b.encoder);
    free(b.context.ids);
    free(b.end.ids);
    return good;
}

void eval_set_close(EvalSet *set)
{
    free(set->path);
    free(set->items);
    free(set->texts);
    free(set->ids.ids);
    *set = (EvalSet){0};
}

uint64_t eval_set_fingerprint(const EvalSet *set)
{
    return fingerprint_bytes(0, set->ids.ids, set->ids.count * sizeof *set->ids.ids);
}
