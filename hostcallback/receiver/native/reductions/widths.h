// Compiles a loop over vectors for several kinds of CPUs, and chooses one at run time.
#ifndef HOSTCALLBACK_REDUCTIONS_WIDTHS_H_
#define HOSTCALLBACK_REDUCTIONS_WIDTHS_H_

namespace hcb {

// A loop is a function template with this attribute: it then has the instructions of the function that it is
// inlined in.
#define HCB_LOOP inline __attribute__((always_inline))

// Vectors of `kBytes` bytes. They are local variables only: how they are passed to a function depends on the
// CPU.
template <typename T, int kBytes>
struct Vectors {
  typedef T Type __attribute__((vector_size(kBytes), may_alias));
};

#if defined(__x86_64__)
enum class Width { k128, k256, k512 };

inline Width CpuWidth() {
  static const Width width = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                                 ? Width::k512
                             : __builtin_cpu_supports("avx2") ? Width::k256
                                                              : Width::k128;
  return width;
}

// Defines `result name parameters`, which calls `loop<T, bytes of a vector> arguments`.
#define HCB_FOR_EACH_WIDTH(result, name, parameters, loop, arguments)                 \
  template <typename T>                                                               \
  __attribute__((noinline, target("avx512f,avx512bw"))) result name##512 parameters { \
    return loop<T, 64> arguments;                                                     \
  }                                                                                   \
  template <typename T>                                                               \
  __attribute__((noinline, target("avx2"))) result name##256 parameters {             \
    return loop<T, 32> arguments;                                                     \
  }                                                                                   \
  template <typename T>                                                               \
  result name parameters {                                                            \
    if (CpuWidth() == Width::k512) return name##512 < T > arguments;                  \
    if (CpuWidth() == Width::k256) return name##256 < T > arguments;                  \
    return loop<T, 16> arguments;                                                     \
  }
#else
#define HCB_FOR_EACH_WIDTH(result, name, parameters, loop, arguments) \
  template <typename T>                                               \
  result name parameters {                                            \
    return loop<T, 16> arguments;                                     \
  }
#endif

}  // namespace hcb

#endif  // HOSTCALLBACK_REDUCTIONS_WIDTHS_H_
