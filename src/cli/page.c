#include "page.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "files.h"

static const char style[] =
    "body{font:15px/1.45 system-ui,sans-serif;color:#1c2330;background:#fff;margin:2em auto;max-width:70em;"
    "padding:0 1em}\n"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}p{max-width:48em}\n"
    "pre,td,th{font:13px/1.5 ui-monospace,monospace}pre{overflow-x:auto}\n"
    "table{border-collapse:collapse}td,th{padding:.15em .7em;text-align:left;border-bottom:1px solid "
    "#e3e6ec}\n"
    "td.right,th.right{text-align:right}.wide{overflow-x:auto}\n"
    "svg{display:block;max-width:100%;height:auto;margin:.5em 0 1.5em}\n"
    "svg text{font:12px system-ui,sans-serif;fill:#3a4456}\n"
    ".box{fill:#f4f5f8;stroke:#9aa3b2}.line{stroke:#fff;stroke-opacity:.55}\n"
    ".flow{fill:none;stroke-opacity:.55}.flow:hover{stroke-opacity:1}.packed{stroke-dasharray:7 4}\n"
    "rect.packed{stroke:#1c2330;stroke-width:1.5}\n"
    "table.heat td{border:2px solid #fff;text-align:center}table.heat small{display:block;opacity:.8}\n"
    "td.refused{background:#eee;color:#777}\n";

int page_open(const char *file, const char *title, page *out) {
    *out = (page){.file = file};
    out->out = open_memstream(&out->text, &out->bytes);
    if (!out->out)
        return failure("not enough memory");
    page_markup(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
                     "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
                     "style-src 'unsafe-inline'\"/>\n<title>");
    page_text(out, "%s", title);
    page_markup(out, "</title>\n<style>\n%s</style>\n</head>\n<body>\n<h1>", style);
    page_text(out, "%s", title);
    page_markup(out, "</h1>\n");
    return EXIT_DONE;
}

void page_markup(page *to, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vfprintf(to->out, format, arguments);
    va_end(arguments);
}

static const char *escaped(char c) {
    switch (c) {
    case '&':
        return "&amp;";
    case '<':
        return "&lt;";
    case '>':
        return "&gt;";
    case '"':
        return "&quot;";
    default:
        /* XML cannot express other control characters. */
        return (unsigned char)c < ' ' && c != '\n' && c != '\t' ? "?" : NULL;
    }
}

/* The page is UTF-8, and names are any bytes. */
static void write_escaped(page *to, const char *words) {
    for (const char *c = words; *c;) {
        const size_t bytes = text_character(c);
        const char *instead = bytes ? escaped(*c) : "?";
        if (instead)
            (void)fputs(instead, to->out);
        else
            (void)fwrite(c, 1, bytes, to->out);
        c += bytes ? bytes : 1;
    }
}

void page_text(page *to, const char *format, ...) {
    char *words = NULL;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&words, format, arguments);
    va_end(arguments);
    if (length < 0) {
        to->failed = true;
        return;
    }
    write_escaped(to, words);
    free(words);
}

void page_table(page *to, const table *list) {
    page_markup(to, "<div class=\"wide\"><table>\n");
    for (size_t i = 0; i < list->count; i++) {
        const size_t column = i % list->columns;
        const char *tag = i < list->columns ? "th" : "td";
        page_markup(to, "%s<%s%s>", column ? "" : "<tr>", tag, list->right[column] ? " class=\"right\"" : "");
        write_escaped(to, list->cells[i]);
        page_markup(to, "</%s>%s", tag, column + 1 == list->columns ? "</tr>\n" : "");
    }
    page_markup(to, "</table></div>\n");
}

text page_rank_colour(uint32_t rank) {
    /* The golden angle: neighbours lie far apart on the circle, and no colour comes twice. */
    return text_format("hsl(%.0f 62%% %u%%)", (double)((uint64_t)rank * 137508 % 360000) / 1000,
                       rank % 2 ? 44 : 56);
}

int page_close(page *to) {
    page_markup(to, "</body>\n</html>\n");
    const bool made = !to->failed && !ferror(to->out);
    int result = fclose(to->out) == 0 && made ? file_write(to->file, to->text) : failure("not enough memory");
    free(to->text);
    return result;
}
