#include "transport/notices.h"

/* The name and the bytes follow it. */
typedef struct notice_head {
    uint32_t sender_bytes; /* with the NUL */
    uint32_t bytes;
} notice_head;

size_t kvf_notice_room(const char *sender, size_t bytes) {
    return sizeof(notice_head) + strnlen(sender, KVF_SENDER_MAX) + 1 + bytes;
}

kvf_status kvf_notices_add(kvf_buffer *to, const char *sender, const void *data, size_t bytes) {
    size_t length = strnlen(sender, KVF_SENDER_MAX);
    notice_head head = {(uint32_t)length + 1, (uint32_t)bytes};
    kvf_status status = kvf_buffer_room(to, kvf_notice_room(sender, bytes));
    if (status)
        return status;
    (void)kvf_buffer_add(to, &head, sizeof head);
    (void)kvf_buffer_add(to, sender, length);
    (void)kvf_buffer_add(to, "", 1);
    return kvf_buffer_add(to, data, bytes);
}

bool kvf_notices_next(const kvf_buffer *from, size_t *at, kvf_notice *out) {
    notice_head head;
    if (*at == from->length)
        return false;
    memcpy(&head, from->data + *at, sizeof head);
    *at += sizeof head;
    out->sender = (const char *)from->data + *at;
    *at += head.sender_bytes;
    out->data = from->data + *at;
    out->bytes = head.bytes;
    *at += head.bytes;
    KVF_ASSERT(*at <= from->length);
    return true;
}
