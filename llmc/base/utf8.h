// Checking and repairing UTF-8 (Unicode 15, table 3-7: shortest forms only, no surrogates, nothing above
// U+10FFFF).
#pragma once
#include <stddef.h>
#include <stdint.h>

// Number of bytes at the start of text that are valid UTF-8 (== len when all of it is).
size_t utf8_valid_prefix(const char *text, size_t len);

// Number of bytes at the start of text behind which there is nothing, or the beginning of a character that
// more bytes may complete.
size_t utf8_finished(const char *text, size_t len);

// Writes the character of a code (at most U+10FFFF), 1 to 4 bytes; returns how many.
size_t utf8_put(char *out, uint32_t code);

// Replaces every invalid sequence of `text` (len bytes) by U+FFFD. One replacement stands for a maximal
// subpart, that is for the longest start of a well-formed character found there, or for one byte; this is the
// practice of Unicode section 3.9 and what Python's bytes.decode('utf-8', errors='replace') does. Returns the
// repaired text (malloc'd, *fixed_len bytes, at most 3 * len) and the number of replacements.
char *utf8_repair(const char *text, size_t len, size_t *fixed_len, size_t *replaced);
