// Writes the manual page, or the completion of a shell, from the table of options: manual man | bash | zsh.
// `make install` runs it.
#include "llmc/records/record.h"
#include "llmc/run/config_internal.h"
#include <stdlib.h>
#include <string.h>

// ---- the manual page --------------------------------------------------------------------------------------

// Text as roff shows it: no escape, and no request at the beginning of a line.
static void put_roff(const char *text)
{
    bool begins = true;
    for (const char *p = text; *p; p++) {
        if (begins && (*p == '.' || *p == '\''))
            fputs("\\&", stdout);
        if (*p == '\\')
            fputs("\\e", stdout);
        else if (*p == '-')
            fputs("\\-", stdout);
        else
            putchar(*p);
        begins = *p == '\n';
    }
}

// What stands for the value of an option; owned by the caller.
static char *placeholder(const Option *o)
{
    if (o->choices)
        return xstrdup(o->choices);
    return xstrdup(o->type == OPT_FLAG ? "" : option_is_number(o) ? "N" : "TEXT");
}

static void man_option(const Option *o)
{
    char *value = placeholder(o), *standard = option_standard(o);
    printf(".TP\n.B ");
    put_roff("--");
    put_roff(o->name);
    if (*value) {
        printf(" \\fI");
        put_roff(value);
        printf("\\fR");
    }
    printf("\n");
    put_roff(o->help);
    if (o->type != OPT_FLAG) {
        printf(" (default ");
        put_roff(*standard ? standard : "none");
        if (option_is_number(o))
            printf("; %.10g to %.10g", o->low, o->high);
        printf(")");
    }
    printf("\n");
    free(value);
    free(standard);
}

static void man_presets(void)
{
    char *text;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);
    if (!f)
        fatal(EXIT_BAD_INPUT, "no memory");
    config_print_presets(f);
    fclose(f);
    printf(".SH PRESETS\nEach is as the one that it is based on, with these changes:\n.PP\n.nf\n");
    put_roff(text);
    printf(".fi\n");
    free(text);
}

static void man(void)
{
    fputs(".TH TRAIN_GPT 1\n.SH NAME\ntrain_gpt, train_gpt_cpu \\- train the GPT of the NanoGPT speedrun\n"
          ".SH SYNOPSIS\n.nf\n\\fBtrain_gpt\\fR \\-\\-preset NAME \\-\\-train\\-files GLOB \\-\\-val\\-files "
          "GLOB [options]\n"
          "\\fBtrain_gpt\\fR \\-\\-resume FOLDER [options]\n"
          "\\fBtrain_gpt\\fR \\-\\-resume FOLDER \\-\\-sample TEXT [options]\n.fi\n.SH DESCRIPTION\n",
          stdout);
    put_roff(
        "train_gpt trains on GPUs, train_gpt_cpu on the CPU. They read shards of tokens, which tokenize "
        "writes, and "
        "log the losses. Every run gets a folder of its own with its log, its options (run.toml) and its "
        "checkpoints. Ctrl-C, SIGTERM and SIGHUP end a run after the step that is under way and save its "
        "state, from which --resume goes on.\n");
    printf(".PP\n");
    put_roff("Options are written --name value or --name=value; flags need no value.\n");
    printf(".SH OPTIONS\n");
    for (const Option *o = config_options; o->name; o++) {
        if (o->section)
            printf(".SS %s\n", o->section);
        man_option(o);
    }
    man_presets();
    printf(".SH EXIT STATUS\n");
    for (int i = 0; exit_statuses[i]; i++) {
        printf(".TP\n%d\n", i);
        put_roff(exit_statuses[i]);
        printf("\n");
    }
    fputs(".SH FILES\n.TP\n.I runs/<date>_<preset>_<id>/\nthe folder of a run: \\fI<uuid>.txt\\fR, its log; "
          "\\fI<uuid>.jsonl\\fR, the same and more for plots; \\fIrun.toml\\fR, with which "
          "\\fB\\-\\-config\\fR "
          "repeats it; \\fIstep_000123.safetensors\\fR, checkpoints\n"
          ".SH SEE ALSO\n\\fBtokenize\\fR \\-\\-help makes shards. Tools for runs begin with train_gpt_: "
          "\\fBtrain_gpt_compare\\fR, \\fBtrain_gpt_plot_curve\\fR, \\fBtrain_gpt_sweep\\fR and others, "
          "each with \\-\\-help.\n",
          stdout);
}

// ---- completions ------------------------------------------------------------------------------------------

// What the value of an option can be, words with blanks in between; owned by the caller. "": anything.
static char *words_of(const Option *o)
{
    char *words = xstrdup(o->choices ? o->choices : "");
    for (char *p = words; *p; p++)
        *p = *p == '|' ? ' ' : *p;
    bool record = !strcmp(o->name, "preset") || !strcmp(o->name, "network");
    for (int i = 0; record && records[i]; i++) {
        char *longer = format_string("%s%s%s", words, i ? " " : "", records[i]->name);
        free(words);
        words = longer;
    }
    return words;
}

// Where no words are known, bash completes names of files (-o default).
static void bash(void)
{
    fputs("# bash completion of train_gpt and train_gpt_cpu\n"
          "_train_gpt()\n{\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words\n"
          "    # --name=value is three words here\n"
          "    if [[ $cur == = ]]; then\n        cur=\n"
          "    elif [[ $prev == = ]]; then\n        prev=${COMP_WORDS[COMP_CWORD-2]}\n    fi\n"
          "    local options='",
          stdout);
    for (const Option *o = config_options; o->name; o++)
        printf("%s--%s", o == config_options ? "" : " ", o->name);
    printf("'\n    COMPREPLY=()\n    case $prev in\n");
    for (const Option *o = config_options; o->name; o++) {
        char *words = words_of(o);
        if (o->type == OPT_FLAG)
            printf("        --%s) words=$options ;;\n", o->name);
        else if (*words)
            printf("        --%s) words='%s' ;;\n", o->name, words);
        free(words);
    }
    fputs("        --*) return ;;\n        *) words=$options ;;\n    esac\n"
          "    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}\n"
          "complete -o default -F _train_gpt train_gpt train_gpt_cpu\n",
          stdout);
}

// The first clause of a description, in single quotes and brackets.
static void put_brief(const char *text)
{
    int length = (int)strcspn(text, ";:([");
    while (length > 0 && text[length - 1] == ' ')
        length--;
    for (int i = 0; i < length; i++) {
        if (text[i] == '\'')
            fputs("'\\''", stdout);
        else
            putchar(text[i]);
    }
}

static void zsh(void)
{
    fputs("#compdef train_gpt train_gpt_cpu\n_arguments", stdout);
    for (const Option *o = config_options; o->name; o++) {
        char *words = words_of(o);
        printf(" \\\n  '--%s%s[", o->name, o->type == OPT_FLAG ? "" : "=");
        put_brief(o->help);
        if (*words)
            printf("]:%s:(%s)'", o->name, words);
        else if (o->type != OPT_FLAG)
            printf("]:%s:%s'", o->name, o->type == OPT_TEXT ? "_files" : "");
        else
            printf("]'");
        free(words);
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*write)(void);
    } forms[] = {{"man", man}, {"bash", bash}, {"zsh", zsh}};
    set_program_name("manual", -1);
    for (size_t i = 0; argc == 2 && i < sizeof forms / sizeof *forms; i++) {
        if (strcmp(argv[1], forms[i].name))
            continue;
        forms[i].write();
        return finish_output();
    }
    fatal(EXIT_USAGE, "usage: manual man|bash|zsh");
}
