// Compiles only if each name of the CUDA driver that src/cuda/driver.h declares means the same in the driver's own
// header: functions by the number of arguments and by what each is, structs by size and offsets, constants by value.
// For driver_names.sh, which makes driver_constants.h.
#include <cstddef>
#include <type_traits>

#define _Noreturn [[noreturn]]
#include "base/base.h"

#define _Static_assert static_assert
namespace ours {
#include "cuda/driver.h"
#define FUNCTION(name, arguments) using type_of_##name = CUresult(*) arguments;
KVF_CUDA_FUNCTIONS(FUNCTION)
KVF_CUDA_LATER_FUNCTIONS(FUNCTION)
#undef FUNCTION
#define CONSTANT(name) constexpr long long value_of_##name = name;
#include "driver_constants.h"
#undef CONSTANT
} // namespace ours

#define __CUDA_API_VERSION_INTERNAL 1 // each symbol under its own name, also those of older versions
#include <cuda.h>

// An int stands for an enumeration. What pointers point to is compared below, by its size, where it is a struct.
template <class A, class B> constexpr bool is_passed_as() {
    if constexpr (std::is_pointer_v<A> && std::is_pointer_v<B>)
        return true;
    else
        return std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B> &&
               sizeof(A) == sizeof(B) && alignof(A) == alignof(B);
}

template <class A, class B> struct called_alike : std::false_type {};
template <class R, class S, class... A, class... B> struct called_alike<R (*)(A...), S (*)(B...)> {
    static constexpr bool all() {
        if constexpr (sizeof...(A) == sizeof...(B))
            return is_passed_as<R, S>() && (is_passed_as<A, B>() && ...);
        else
            return false;
    }
    static constexpr bool value = all();
};

#define FUNCTION(name, arguments)                                                                            \
    static_assert(called_alike<decltype(&::name), ours::type_of_##name>::value, #name);
KVF_CUDA_FUNCTIONS(FUNCTION)
KVF_CUDA_LATER_FUNCTIONS(FUNCTION)

#define CONSTANT(name) static_assert(ours::value_of_##name == static_cast<long long>(name), #name);
#include "driver_constants.h"

#define SIZE(type) static_assert(sizeof(ours::type) == sizeof(::type), #type)
#define MEMBER(type, own, name)                                                                              \
    static_assert(offsetof(ours::type, own) == offsetof(::type, name) &&                                     \
                      sizeof(ours::type::own) == sizeof(::type::name),                                       \
                  #type "." #name)
SIZE(CUipcMemHandle);
SIZE(CUmemFabricHandle);
SIZE(CUuuid);
SIZE(CUmemLocation);
MEMBER(CUmemLocation, type, type);
MEMBER(CUmemLocation, id, id);
SIZE(CUmemAllocationProp);
MEMBER(CUmemAllocationProp, type, type);
MEMBER(CUmemAllocationProp, requestedHandleTypes, requestedHandleTypes);
MEMBER(CUmemAllocationProp, location, location);
MEMBER(CUmemAllocationProp, allocFlags, allocFlags);
MEMBER(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable, allocFlags.gpuDirectRDMACapable);
SIZE(CUmemAccessDesc);
MEMBER(CUmemAccessDesc, location, location);
MEMBER(CUmemAccessDesc, flags, flags);

#ifdef CONTROL // what must not compile
#if CONTROL == 1
using wrong = ours::CUresult (*)(ours::CUdeviceptr *);
static_assert(called_alike<decltype(&::cuMemAlloc_v2), wrong>::value, "an argument is missing");
#elif CONTROL == 2
using wrong = ours::CUresult (*)(ours::CUdeviceptr *, unsigned);
static_assert(called_alike<decltype(&::cuMemAlloc_v2), wrong>::value, "an argument has another size");
#endif
#endif
