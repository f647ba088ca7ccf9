/* Whether a sanitizer is built in: tests that repeat themselves do so less often there, being several times slower. */
#ifndef KVF_TEST_SANITIZED_H
#define KVF_TEST_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/** A number of repetitions: a quarter of them in sanitized builds. */
#define OFTEN(times) (SANITIZED ? (times) / 4 : (times))

#endif
