# The fuzz targets: one executable for each file of fuzz/ that has libFuzzer's entry point, and the program that
# writes their binary seeds. They need clang, and all fuzzed code must be instrumented, so that they have their own
# preset: scripts/fuzz.

option(KVF_BUILD_FUZZ "Build the fuzz targets: needs clang and KVF_SANITIZE=fuzzer-no-link,..." OFF)
if(NOT KVF_BUILD_FUZZ)
  return()
endif()
if(NOT CMAKE_C_COMPILER_ID STREQUAL "Clang" OR NOT KVF_SANITIZE MATCHES "fuzzer-no-link" OR NOT KVF_BUILDS_AGENT)
  message(FATAL_ERROR "KVF_BUILD_FUZZ is ON; it needs clang, KVF_SANITIZE=fuzzer-no-link,address,undefined and "
                      "the sessions (KVF_WITH_AGENT): use the preset fuzz")
endif()

# kvf_fuzz_program(TARGET OUTPUT_NAME sources...)
function(kvf_fuzz_program target output)
  add_executable(${target} ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output}
                                             RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/fuzz)
  target_compile_definitions(${target} PRIVATE _GNU_SOURCE ${KVF_FABRIC_DEFINITIONS})
  target_include_directories(${target} SYSTEM PRIVATE ${KVF_FABRIC_FOLDERS})
  target_link_libraries(${target} PRIVATE kvferry_static)
endfunction()

file(GLOB fuzz_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/fuzz/*.c)
foreach(source IN LISTS fuzz_sources)
  file(STRINGS ${source} entry_lines REGEX "^int LLVMFuzzerTestOneInput\\(" LIMIT_COUNT 1)
  if(entry_lines)
    get_filename_component(name ${source} NAME_WE)
    kvf_fuzz_program(fuzz_${name} ${name} ${source} ${PROJECT_SOURCE_DIR}/fuzz/messages.c)
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  endif()
endforeach()
kvf_fuzz_program(fuzz_seeds seeds fuzz/seeds.c fuzz/seeds_agent.c fuzz/seeds_card.c fuzz/seeds_cuda.c
                 fuzz/seeds_shm.c fuzz/seeds_batches.c fuzz/messages.c)

# Fuzz targets of whole agents, over the simulated network and clock of the tests.
if(NOT CMOCKA_FOUND)
  message(FATAL_ERROR "KVF_BUILD_FUZZ is ON, but pkg-config finds no cmocka (Debian: libcmocka-dev)")
endif()
target_sources(fuzz_agent PRIVATE fuzz/agent_model.c fuzz/agent_peer.c tests/unit/agent_net.c)
target_include_directories(fuzz_agent PRIVATE tests/unit)
target_link_libraries(fuzz_agent PRIVATE PkgConfig::CMOCKA)

# The transport "cuda" over the stand-in for the driver, which the target finds in its own folder.
add_library(fuzz_cuda_driver SHARED tests/fakes/fake_cuda.c tests/fakes/fake_cuda_memory.c
                                    tests/fakes/fake_cuda_virtual.c tests/fakes/fake_cuda_streams.c)
set_target_properties(fuzz_cuda_driver PROPERTIES OUTPUT_NAME cuda SOVERSION 1
                                                  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
target_include_directories(fuzz_cuda_driver PRIVATE include src tests/fakes)
target_compile_definitions(fuzz_cuda_driver PRIVATE _GNU_SOURCE)
target_include_directories(fuzz_cuda PRIVATE tests/fakes)
target_link_libraries(fuzz_cuda PRIVATE fuzz_cuda_driver)
