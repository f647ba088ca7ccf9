/*
 * kvferry completion: prints a shell's script to complete commands, options and their values. The script is made from
 * the tables that the parser reads, so that no list exists twice.
 */
#include <stdio.h>
#include <string.h>

#include "option_table.h"

static const char *const shells[] = {"bash", "zsh", "fish", NULL};

/* Calls `each` for every option that a command shows. */
static void each_option(const command *of, void (*each)(const command *of, const option_row *row)) {
    const option_row *row;
    for (uint32_t i = 0; (row = option_row_get(i)) != NULL; i++)
        if (row->commands & of->bit && row->help)
            each(of, row);
}

static void each_command(void (*each)(const command *of)) {
    const command *of;
    for (uint32_t i = 0; (of = command_get(i)) != NULL; i++)
        each(of);
}

/* Prints the words of an option's value with blanks between them; for KEY=VALUE,... the keys, each with its '='. */
static void print_words(const option_row *row) {
    const char *word;
    for (uint32_t i = 0; row->words && (word = row->words(NULL, i)) != NULL; i++)
        printf("%s%s%s", i ? " " : "", word, row->keys ? "=" : "");
}

static void print_command_words(const char *between) {
    const command *of;
    for (uint32_t i = 0; (of = command_get(i)) != NULL; i++)
        printf("%s%s", of->name, between);
    printf("help");
}

/* What engines can be asked, see ask_command.c. */
static const char *const verbs[] = {"drain", "resume", "list", "hand-over", NULL};

/* Prints the words that may be operands: the shells of the completion command itself, and what engines are asked. */
static void print_operand_words(const command *of, const char *between) {
    static const char *const none[] = {NULL};
    const char *const *all = of->bit == COMMAND_COMPLETION ? shells : of->bit == COMMAND_ASK ? verbs : none;
    for (uint32_t i = 0; all[i]; i++)
        printf("%s%s", i ? between : "", all[i]);
}

/* ---- bash ------------------------------------------------------------------------------------ */

static void bash_option(const command *of, const option_row *row) {
    (void)of;
    printf(" --%s", row->name);
}

static void bash_options(const command *of) {
    printf("    %s) words=\"", of->name);
    print_operand_words(of, " ");
    each_option(of, bash_option);
    printf(" --help\" ;;\n");
}

static void bash_value(const command *of, const option_row *row) {
    if (!row->argument)
        return;
    printf("    \"%s --%s\") kind=%s words=\"", of->name, row->name,
           row->keys   ? "keys"
           : row->file ? "file"
                       : "word");
    print_words(row);
    printf("\" ;;\n");
}

static void bash_values(const command *of) {
    each_option(of, bash_value);
}

static void print_bash(void) {
    printf(
        "# bash completion of kvferry; load it with: source <(kvferry completion bash)\n"
        "_kvferry() {\n"
        "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
        "  local kind=word words= command=${COMP_WORDS[1]} line\n"
        "  # bash cuts words at '=': --json=x and tp=4 come in pieces.\n"
        "  line=${COMP_LINE:0:COMP_POINT}\n"
        "  line=${line##* }\n"
        "  COMPREPLY=()\n"
        "  if [ \"$COMP_CWORD\" -eq 1 ] || { [ \"$COMP_CWORD\" -eq 2 ] && [ \"$command\" = help ]; }; then\n"
        "    COMPREPLY=($(compgen -W '");
    print_command_words(" ");
    printf(" --help --version' -- \"$word\"))\n"
           "    return\n"
           "  fi\n"
           "  local i=$((COMP_CWORD - 1))\n"
           "  if [ \"$word\" != \"$line\" ]; then\n"
           "    while [ \"$i\" -gt 1 ] && [[ ${COMP_WORDS[i]} != --* ]]; do i=$((i - 1)); done\n"
           "    before=${COMP_WORDS[i]}\n"
           "  fi\n"
           "  case \"$command $before\" in\n");
    each_command(bash_values);
    printf("    *) kind=option ;;\n"
           "  esac\n"
           "  if [ \"$kind\" = option ]; then\n"
           "    case $command in\n");
    each_command(bash_options);
    printf("    esac\n"
           "  fi\n"
           "  [ \"$word\" = = ] && word=\n"
           "  case $kind in\n"
           "    file)\n"
           "      # Names of files may have blanks, and go on after that of a folder.\n"
           "      compopt -o filenames 2>/dev/null\n"
           "      COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
           "      mapfile -t -O \"${#COMPREPLY[@]}\" COMPREPLY < <(compgen -f -- \"$word\") ;;\n"
           "    keys)\n"
           "      # The last KEY= of KEY=VALUE,...: what stands before it stays.\n"
           "      local done=\n"
           "      [[ $word == *,* ]] && done=${word%%,*},\n"
           "      COMPREPLY=($(compgen -P \"$done\" -W \"$words\" -- \"${word##*,}\"))\n"
           "      compopt -o nospace 2>/dev/null ;;\n"
           "    *) COMPREPLY=($(compgen -W \"$words\" -- \"$word\")) ;;\n"
           "  esac\n"
           "}\n"
           "complete -F _kvferry kvferry\n");
}

/* ---- zsh ------------------------------------------------------------------------------------- */

/* Prints a text that stands inside '...' and inside [...] of _arguments. */
static void print_quoted(const char *sentence) {
    for (; *sentence; sentence++) {
        if (*sentence == '\'')
            printf("'\\''");
        else if (strchr("[]:\\", *sentence))
            printf("\\%c", *sentence);
        else
            printf("%c", *sentence);
    }
}

static void zsh_option(const command *of, const option_row *row) {
    (void)of;
    const bool may_be_left_out = option_value_may_be_left_out(row);
    printf("        '*--%s%s[", row->name, row->argument ? "=" : "");
    print_quoted(row->help);
    printf("]%s", row->argument ? may_be_left_out ? "::" : ":" : "");
    if (row->argument) {
        print_quoted(row->name);
        printf(":");
    }
    if (row->words && row->keys) {
        printf("_values -s , -w shape ");
        const char *word;
        for (uint32_t i = 0; (word = row->words(NULL, i)) != NULL; i++)
            printf("%s%s\\:", i ? " " : "", word);
    } else if (row->words) {
        printf(row->file ? "{ compadd -- " : "(");
        print_words(row);
        printf(row->file ? "; _files }" : ")");
    } else if (row->file) {
        printf("_files");
    }
    printf("' \\\n");
}

static void zsh_command(const command *of) {
    printf("    %s)\n      _arguments \\\n", of->name);
    each_option(of, zsh_option);
    printf("        '--help[show how to use it]'");
    if (of->bit == COMMAND_COMPLETION) {
        printf(" \\\n        '1:shell:(");
        print_operand_words(of, " ");
        printf(")'");
    }
    printf("\n      ;;\n");
}

static void zsh_summary(const command *of) {
    printf("    '%s:", of->name);
    print_quoted(of->summary);
    printf("'\n");
}

static void print_zsh(void) {
    printf("#compdef kvferry\n"
           "# zsh completion of kvferry: a file _kvferry in a folder of $fpath, or: source <(kvferry "
           "completion zsh)\n"
           "_kvferry() {\n"
           "  local -a commands\n"
           "  commands=(\n");
    each_command(zsh_summary);
    printf("    'help:show how to use a command'\n"
           "  )\n"
           "  if (( CURRENT == 2 )) || { (( CURRENT == 3 )) && [[ $words[2] == help ]] }; then\n"
           "    _describe command commands\n"
           "    return\n"
           "  fi\n"
           "  local chosen=$words[2]\n"
           "  shift words\n"
           "  (( CURRENT-- ))\n"
           "  case $chosen in\n");
    each_command(zsh_command);
    printf("  esac\n"
           "}\n"
           "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _kvferry \"$@\"; else compdef _kvferry "
           "kvferry; fi\n");
}

/* ---- fish ------------------------------------------------------------------------------------ */

static void print_fish_text(const char *sentence) {
    for (; *sentence; sentence++)
        printf(strchr("'\\", *sentence) ? "\\%c" : "%c", *sentence);
}

static void fish_option(const command *of, const option_row *row) {
    const bool may_be_left_out = option_value_may_be_left_out(row);
    printf("complete -c kvferry -n '__fish_seen_subcommand_from %s' -l %s%s%s", of->name, row->name,
           row->argument && !may_be_left_out ? " -r" : "", row->file ? " -F" : " -f");
    if (row->words) {
        printf(" -a '");
        print_words(row);
        printf("'");
    }
    printf(" -d '");
    print_fish_text(row->help);
    printf("'\n");
}

static void fish_command(const command *of) {
    printf("complete -c kvferry -n __fish_use_subcommand -f -a %s -d '", of->name);
    print_fish_text(of->summary);
    printf("'\n");
    each_option(of, fish_option);
    if (of->bit == COMMAND_COMPLETION) {
        printf("complete -c kvferry -n '__fish_seen_subcommand_from %s' -f -a '", of->name);
        print_operand_words(of, " ");
        printf("'\n");
    }
}

static void print_fish(void) {
    printf(
        "# fish completion of kvferry: kvferry completion fish > ~/.config/fish/completions/kvferry.fish\n");
    each_command(fish_command);
    printf("complete -c kvferry -n __fish_use_subcommand -f -a help -d 'show how to use a command'\n"
           "complete -c kvferry -n '__fish_seen_subcommand_from help' -f -a '");
    print_command_words(" ");
    printf("'\n");
}

int run_completion(int argc, char **argv) {
    static void (*const printers[])(void) = {print_bash, print_zsh, print_fish};
    options asked;
    uint32_t shell = 0;
    char list[64];
    const words known = words_of_array(shells);
    int result = options_parse(argc, argv, COMMAND_COMPLETION, &asked);
    if (result)
        return result;
    words_list(known, list, sizeof list);
    if (asked.operand_count == 0)
        return usage_error("completion needs the name of a shell: %s", list);
    if (!words_find(known, asked.operands[0], &shell))
        return usage_error("there is no completion for \"%s\"; allowed: %s%s", asked.operands[0], list,
                           words_hint(known, asked.operands[0]).text);
    printers[shell]();
    return EXIT_DONE;
}
