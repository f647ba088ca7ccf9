# How every C file of the project is compiled and linked.

add_compile_options(-Wall -Wextra -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes
                    -Wformat=2 -Wconversion -Wno-sign-conversion -Wvla)
if(KVF_WERROR)
  add_compile_options(-Werror)
endif()

# Code that includes the library's inner headers must be compiled with the same assertions as the library.
if(KVF_ASSERTIONS STREQUAL "AUTO")
  if(KVF_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
    add_compile_definitions(KVF_ASSERTIONS)
  endif()
elseif(KVF_ASSERTIONS)
  add_compile_definitions(KVF_ASSERTIONS)
endif()

# A program that does not use a transport should not load that transport's libraries.
add_link_options(-Wl,--as-needed)

if(KVF_SANITIZE)
  # -fno-sanitize-recover: a finding ends the process, so that the test fails.
  add_compile_options(-fsanitize=${KVF_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # GCC gives false warnings about initialisation in instrumented code.
  if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
    add_compile_options(-Wno-maybe-uninitialized)
  endif()
  add_link_options(-fsanitize=${KVF_SANITIZE})
endif()
