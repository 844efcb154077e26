// Shared by the C++ programs of the tests.
#ifndef HOSTCALLBACK_TESTS_CHECK_H_
#define HOSTCALLBACK_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>

// Ends the program with the line if the condition does not hold.
#define CHECK(condition)                                                         \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      std::abort();                                                              \
    }                                                                            \
  } while (0)

#endif  // HOSTCALLBACK_TESTS_CHECK_H_
