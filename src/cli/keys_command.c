/*
 * kvferry keys: writes a new pair of keys, as --key-file reads it.
 */
#include <kvferry/agent.h>
#include <string.h>
#include <sys/stat.h>

#include "json.h"
#include "options.h"

int run_keys(int argc, char **argv) {
    options asked;
    char public_key[41], secret_key[41];
    (void)umask(S_IRWXG | S_IRWXO); /* only its owner may read a file with a secret key */
    int result = options_parse(argc, argv, COMMAND_KEYS, &asked);
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
