/*
 * kvferry keys: writes a new pair of keys, as --key-file reads it.
 */
#include <errno.h>
#include <kvferry/agent.h>
#include <string.h>
#include <sys/stat.h>

#include "json.h"
#include "options.h"

/* A file that was there has kept its permissions. */
static int make_private(const char *file) {
    struct stat about;
    if (stat(file, &about) != 0 || !S_ISREG(about.st_mode) || !(about.st_mode & (S_IRWXG | S_IRWXO)) ||
        chmod(file, S_IRUSR | S_IWUSR) == 0)
        return EXIT_DONE;
    return failure("%s: others may read it, and a secret key is not written there: %s", file,
                   strerror(errno));
}

int run_keys(int argc, char **argv) {
    options asked;
    char public_key[41], secret_key[41];
    (void)umask(S_IRWXG | S_IRWXO); /* only its owner may read a file with a secret key */
    int result = options_parse(argc, argv, COMMAND_KEYS, &asked);
    if (!result && asked.json)
        result = make_private(asked.json);
    if (result)
        return result;
    kvf_status status = kvf_agent_make_keys(public_key, secret_key);
    if (status)
        return library_failure(status, "keys");
    struct json_object *out = json_object_new_object();
    json_text(out, "public_key", public_key);
    json_text(out, "secret_key", secret_key);
    memset(secret_key, 0, sizeof secret_key);
    return json_write(out, asked.json ? asked.json : "-");
}
