# The tests of ctest. Labels are the folders' names: `ctest -L unit`. Every test has a time limit, so that a test
# that hangs fails; the limits are generous, because they must hold under sanitizers on a small machine.

if(KVF_SANITIZE)
  set(KVF_LIMIT_FACTOR 3)
else()
  set(KVF_LIMIT_FACTOR 1)
endif()
get_filename_component(KVF_PRESET ${PROJECT_BINARY_DIR} NAME)
set(KVF_TEST_ENVIRONMENT "KVF_PRESET=${KVF_PRESET}"
                         "ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1"
                         # LeakSanitizer mishandles the thread-local memory of libraries that are loaded late.
                         "LSAN_OPTIONS=intercept_tls_get_addr=0:print_suppressions=0:suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.suppressions"
                         "UBSAN_OPTIONS=print_stacktrace=1" "TSAN_OPTIONS=halt_on_error=1:suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.suppressions")

# kvf_add_test(NAME LABEL SECONDS command...)
function(kvf_add_test name label seconds)
  add_test(NAME ${name} COMMAND ${ARGN} WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
  math(EXPR limit "${seconds} * ${KVF_LIMIT_FACTOR}")
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${limit}
                                          ENVIRONMENT "${KVF_TEST_ENVIRONMENT}")
endfunction()

kvf_add_programs(tests/unit unit NAMES unit_names NEEDS PkgConfig::CMOCKA ALSO tests/faults/faulty_fabric.c)
# `make check` also runs tests under ThreadSanitizer, as `ctest -L threads`: agents, fabrics, and all others that start
# threads. Left out are transport_faults_test and transport_push_test, which have one thread and would repeat transfers
# for minutes, and transport_fork_test and transport_process_test, in which a child of fork() starts threads, which
# ThreadSanitizer cannot follow.
add_custom_target(threads)
foreach(name IN LISTS unit_names)
  kvf_add_test(${name} unit 300 ${name})
  file(STRINGS tests/unit/${name}.c thread_lines REGEX "pthread_create\\(" LIMIT_COUNT 1)
  if(thread_lines OR (name MATCHES "^(agent|link|transport|stage_workers)_" AND NOT name MATCHES "^transport_(faults|fork|process|push)_"))
    set_property(TEST ${name} APPEND PROPERTY LABELS threads)
    add_dependencies(threads ${name})
  endif()
  # Two processes that poll for each other need a processor each.
  file(STRINGS tests/unit/${name}.c fork_lines REGEX "[^a-z_]fork\\(" LIMIT_COUNT 1)
  if(fork_lines OR name MATCHES "^transport_(ucx|libfabric)")
    set_tests_properties(${name} PROPERTIES PROCESSORS 2)
  endif()
endforeach()

# Libraries that are offered as UCX for transport_library_test, which expects that most of them are refused.
if(KVF_USES_UCX)
  # kvf_add_fake(NAME FILES files... DEFINITIONS definitions...): builds tests/fakes/libNAME.so
  function(kvf_add_fake name)
    cmake_parse_arguments(arg "" "" "FILES;DEFINITIONS" ${ARGN})
    list(TRANSFORM arg_FILES PREPEND ${PROJECT_SOURCE_DIR}/tests/fakes/)
    add_library(${name} MODULE ${arg_FILES})
    set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fakes)
    target_include_directories(${name} PRIVATE include src)
    target_include_directories(${name} SYSTEM PRIVATE ${KVF_FABRIC_FOLDERS})
    target_compile_definitions(${name} PRIVATE _GNU_SOURCE ${arg_DEFINITIONS})
    add_dependencies(transport_library_test ${name})
    add_dependencies(transport_ucx_devices_test ${name})
  endfunction()
  set(fake_files fake_ucx.c fake_ucx_words.c)
  kvf_add_fake(fake_ucx_whole FILES ${fake_files} DEFINITIONS FAKE_MAJOR=1 FAKE_MINOR=99)
  kvf_add_fake(fake_ucx_old FILES ${fake_files} DEFINITIONS FAKE_MAJOR=1 FAKE_MINOR=12)
  kvf_add_fake(fake_ucx_next FILES ${fake_files} DEFINITIONS FAKE_MAJOR=2 FAKE_MINOR=0)
  kvf_add_fake(fake_ucx_lacking FILES ${fake_files}
               DEFINITIONS FAKE_MAJOR=1 FAKE_MINOR=99 FAKE_LACKS="ucp_put_nbx")
  kvf_add_fake(fake_ucx_devices FILES ${fake_files} fake_ucx_devices.c DEFINITIONS FAKE_MAJOR=1 FAKE_MINOR=99)
  target_include_directories(transport_ucx_devices_test PRIVATE tests/fakes)
  kvf_add_fake(no_ucx FILES no_ucx.c)
endif()

# A stand-in for the CUDA driver, which the loader finds before a real one; and one that lacks a function.
if(NOT KVF_CORE_ONLY)
  foreach(name fake_cuda fake_cuda_lacking)
    add_library(${name} MODULE tests/fakes/fake_cuda.c tests/fakes/fake_cuda_memory.c tests/fakes/fake_cuda_virtual.c
                               tests/fakes/fake_cuda_streams.c)
    string(REPLACE fake_ "" folder ${name})
    set_target_properties(${name} PROPERTIES OUTPUT_NAME cuda SUFFIX .so.1
                                             LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/fakes/${folder})
    target_include_directories(${name} PRIVATE include src tests/fakes)
    target_compile_definitions(${name} PRIVATE _GNU_SOURCE)
  endforeach()
  target_compile_definitions(fake_cuda_lacking PRIVATE cuIpcOpenMemHandle_v2=a_function_by_another_name)
  if(TARGET transport_cuda_test)
    add_dependencies(transport_cuda_test fake_cuda_lacking)
  endif()
  target_include_directories(unit_shared PRIVATE tests/fakes)
  kvf_add_test(cuda_kernel_device_test unit 300 cuda_kernel_test device)
  add_dependencies(cuda_kernel_test fake_cuda)
  set_property(TEST cuda_kernel_device_test APPEND PROPERTY ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
  set_property(TEST cuda_kernel_device_test PROPERTY SKIP_RETURN_CODE 77)
  if(TARGET checksum_test)
    kvf_add_test(checksum_device_test unit 300 checksum_test devices)
    add_dependencies(checksum_test fake_cuda)
    set_property(TEST checksum_device_test APPEND PROPERTY ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
    set_property(TEST checksum_device_test PROPERTY SKIP_RETURN_CODE 77)
  endif()
  foreach(name agent_arrival_device_test agent_device_checksums_test agent_device_events_test agent_device_processes_test
               agent_device_test cuda_copier_test cuda_failures_test
               cuda_long_runs_test device_info_test postprocess_device_test
               stage_arenas_test stage_device_blocks_test stage_device_test transport_conformance_test
               transport_cuda_blocks_test transport_cuda_hostile_test transport_cuda_nests_test
               transport_cuda_recovery_test transport_cuda_segments_test transport_cuda_test
               transport_libfabric_devices_test transport_ucx_devices_test)
    if(NOT TARGET ${name})
      continue()
    endif()
    add_dependencies(${name} fake_cuda)
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
    set_property(TEST ${name} PROPERTY SKIP_RETURN_CODE 77)
  endforeach()
  # What these do over a real driver with one device, which takes its time, and makes callers wait wherever one may.
  foreach(name agent_arrival_device_test agent_device_checksums_test agent_device_events_test
               agent_device_processes_test agent_device_test cuda_copier_test cuda_long_runs_test device_info_test
               postprocess_device_test stage_arenas_test stage_device_test transport_cuda_blocks_test
               transport_cuda_hostile_test transport_cuda_nests_test transport_cuda_recovery_test
               transport_cuda_segments_test transport_cuda_test)
    if(TARGET ${name})
      kvf_add_test(${name}_as_real unit 300 ${name})
      set_property(TEST ${name}_as_real
                   APPEND PROPERTY ENVIRONMENT KVF_TEST_DEVICES_AS_REAL=1 FAKE_CUDA_DEVICES=1 FAKE_CUDA_STRICT=1000
                                   FAKE_CUDA_DELAY=200 "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
      set_property(TEST ${name}_as_real PROPERTY SKIP_RETURN_CODE 77)
    endif()
  endforeach()
  # And over one with two devices that do not reach each other, of which such tests use the first.
  foreach(name agent_device_processes_test cuda_copier_test transport_cuda_test)
    if(TARGET ${name})
      kvf_add_test(${name}_apart unit 300 ${name})
      set_property(TEST ${name}_apart
                   APPEND PROPERTY ENVIRONMENT KVF_TEST_DEVICES_AS_REAL=1 FAKE_CUDA_DEVICES=2 FAKE_CUDA_APART=1
                                   "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
      set_property(TEST ${name}_apart PROPERTY SKIP_RETURN_CODE 77)
    endif()
  endforeach()
  # And over one without pools of memory, as many virtual devices are.
  foreach(name cuda_copier_test transport_cuda_test)
    if(TARGET ${name})
      kvf_add_test(${name}_without_pools unit 300 ${name})
      set_property(TEST ${name}_without_pools
                   APPEND PROPERTY ENVIRONMENT FAKE_CUDA_POOLS=0
                                   "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
      set_property(TEST ${name}_without_pools PROPERTY SKIP_RETURN_CODE 77)
    endif()
  endforeach()
endif()

# Runs the benchmark of devices with little memory of the stand-in, to test its code: the figures mean nothing.
if(TARGET bench_cuda AND TARGET fake_cuda)
  kvf_add_test(bench_cuda unit 300 bench_cuda)
  add_dependencies(bench_cuda fake_cuda)
  set_property(TEST bench_cuda APPEND PROPERTY ENVIRONMENT "KVF_BENCH_BYTES=16384" "KVF_BENCH_ROUNDS=1"
               "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
  set_property(TEST bench_cuda PROPERTY SKIP_RETURN_CODE 77)
endif()

# Agent tests again, with every byte packed. Left out are tests of the time for which directly written blocks are in
# doubt, of the pieces that a bandwidth cap makes, of engines with different models, and of messages written by hand.
if(KVF_BUILDS_AGENT)
  foreach(name pull push chunks cancel memory verify storm retry after thread secure loop budget peers)
    kvf_add_test(agent_${name}_packed unit 300 agent_${name}_test)
    set_property(TEST agent_${name}_packed APPEND PROPERTY ENVIRONMENT "KVF_TEST_WAY=packed")
    set_property(TEST agent_${name}_packed APPEND PROPERTY LABELS threads)
  endforeach()
endif()

# Stage tests again, with workers that copy. Not under ThreadSanitizer: some tests move several requests to the same
# memory at once.
foreach(name flow faults)
  kvf_add_test(stage_${name}_workers unit 300 stage_${name}_test)
  set_property(TEST stage_${name}_workers APPEND PROPERTY ENVIRONMENT "KVF_TEST_WORKERS=2")
endforeach()

# The same attacks between transports whose arenas are mapped.
kvf_add_test(stage_hostile_shm unit 300 stage_hostile_test)
set_property(TEST stage_hostile_shm APPEND PROPERTY ENVIRONMENT "KVF_TEST_FABRIC=shm")

# The same of agents whose clock is the machine's: a simulated one does not wait for workers.
if(KVF_BUILDS_AGENT)
  foreach(name thread loop)
    kvf_add_test(agent_${name}_workers unit 300 agent_${name}_test)
    set_property(TEST agent_${name}_workers APPEND PROPERTY ENVIRONMENT "KVF_TEST_WAY=packed" "KVF_TEST_WORKERS=2")
  endforeach()
endif()

# Processes that are killed and stopped while they serve each other; `make check-long` has more requests.
if(KVF_BUILDS_AGENT)
  kvf_add_programs(tests/faults faults NAMES faults_names)
  foreach(name IN LISTS faults_names)
    kvf_add_test(faults.${name} faults 300 faults_${name} --requests 200)
    kvf_add_test(faults.${name}_packed faults 300 faults_${name} --requests 100 --way packed)
    set_tests_properties(faults.${name} faults.${name}_packed PROPERTIES RUN_SERIAL ON)
    # The same with caches on devices of the stand-in. The control: bytes that its kernels spoil are noticed.
    kvf_add_test(faults.${name}_devices faults 300 faults_${name} --requests 60 --round 30 --devices 1)
    kvf_add_test(faults.${name}_spoiled faults 300 faults_${name} --requests 10 --from 1 --devices 1)
    add_dependencies(faults_${name} fake_cuda)
    set_property(TEST faults.${name}_devices faults.${name}_spoiled
                 APPEND PROPERTY ENVIRONMENT "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
    set_property(TEST faults.${name}_spoiled APPEND PROPERTY ENVIRONMENT "FAKE_CUDA_SPOIL=3")
    set_tests_properties(faults.${name}_devices faults.${name}_spoiled PROPERTIES SKIP_RETURN_CODE 77)
    set_tests_properties(faults.${name}_devices PROPERTIES RUN_SERIAL ON)
    set_tests_properties(faults.${name}_spoiled PROPERTIES PASS_REGULAR_EXPRESSION "checksums were wrong")
  endforeach()
endif()

# Honest pairs of agents, which the programs of tests/hostile attack: scripts/check-hostile starts both.
if(KVF_BUILDS_AGENT)
  kvf_add_programs(tests/hostile hostile NAMES hostile_names ALSO tests/faults/content.c)
  list(TRANSFORM hostile_names PREPEND hostile_ OUTPUT_VARIABLE hostile_targets)
  add_custom_target(hostile DEPENDS ${hostile_targets})
endif()

# Agents on hosts that are network namespaces, with links that are slow, cut and gone: scripts/check-network runs them.
if(KVF_BUILDS_AGENT)
  kvf_add_programs(tests/network network NAMES network_names ALSO tests/faults/content.c)
  list(TRANSFORM network_names PREPEND network_ OUTPUT_VARIABLE network_targets)
  add_custom_target(network DEPENDS ${network_targets})
endif()

kvf_add_programs(tests/property property NAMES property_names NEEDS PkgConfig::CMOCKA ALSO tests/unit/device_kernels.c)
foreach(name IN LISTS property_names)
  kvf_add_test(property.${name} property 600 property_${name})
  if(KVF_SANITIZE)
    set_property(TEST property.${name} APPEND PROPERTY ENVIRONMENT "KVF_CASES=600")
  endif()
endforeach()

# One program from all files. Its argument is the folder of the cases, which are recorded answers of a connector.
file(GLOB vectors_sources CONFIGURE_DEPENDS tests/vectors/*.c)
if(NOT KVF_BUILDS_AGENT)
  list(FILTER vectors_sources EXCLUDE REGEX "/(aggregator|handshake)_set\\.c$")
endif()
if(vectors_sources AND KVF_WITH_CONNECTOR)
  add_executable(vectors ${vectors_sources})
  set_target_properties(vectors PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests/vectors)
  target_include_directories(vectors PRIVATE src tests/vectors)
  target_compile_definitions(vectors PRIVATE _GNU_SOURCE $<$<NOT:$<BOOL:${KVF_BUILDS_AGENT}>>:KVF_WITHOUT_ENGINE>
                                             $<$<BOOL:${KVF_CORE_ONLY}>:KVF_WITHOUT_DEVICES>)
  target_link_libraries(vectors PRIVATE kvferry_static PkgConfig::JSONC Threads::Threads m)
  kvf_add_test(vectors vectors 300 vectors ${PROJECT_SOURCE_DIR}/tests/vectors)
  if(TARGET fake_cuda) # the same cases, with blocks to be permuted and copied on a device
    kvf_add_test(vectors_device vectors 300 vectors ${PROJECT_SOURCE_DIR}/tests/vectors)
    add_dependencies(vectors fake_cuda)
    set_property(TEST vectors_device APPEND PROPERTY ENVIRONMENT KVF_VECTORS_DEVICE=1
                                                     "LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/tests/fakes/cuda")
  endif()
endif()

if(NOT KVF_CORE_ONLY)
  kvf_add_programs(examples example PUBLIC NAMES example_names)
  foreach(name IN LISTS example_names)
    kvf_add_test(example.${name} examples 120 example_${name})
  endforeach()
endif()

# A demo starts processes and uses much memory, so that each of these runs alone.
if(TARGET kvferry_command)
  kvf_add_programs(tests/integration integration PUBLIC NAMES integration_names)
  file(GLOB integration_scripts CONFIGURE_DEPENDS tests/integration/*.sh)
  if(KVF_BUILDS_AGENT)
    list(FILTER integration_scripts EXCLUDE REGEX "/without_agents\\.sh$")
  else()
    list(FILTER integration_scripts INCLUDE REGEX "/(page|plan|without_agents)\\.sh$")
  endif()
  foreach(script IN LISTS integration_scripts)
    get_filename_component(name ${script} NAME_WE)
    kvf_add_test(integration.${name} integration 600 bash ${script})
    set_property(TEST integration.${name} APPEND PROPERTY ENVIRONMENT
                 "KVFERRY=$<TARGET_FILE:kvferry_command>" "KVF_BIN_DIR=${PROJECT_BINARY_DIR}")
    if(name MATCHES "^(demo_.*|hand|documents)$")
      set_tests_properties(integration.${name} PROPERTIES RUN_SERIAL ON)
    endif()
  endforeach()
endif()

# The short form of the network tests. Without root, or other things that it needs, it says so and is skipped. It does
# not run under sanitizers, which make the machine too slow.
if(TARGET network AND TARGET kvferry_command AND NOT KVF_SANITIZE)
  kvf_add_test(network network 300 ${PROJECT_SOURCE_DIR}/scripts/check-network ${PROJECT_BINARY_DIR} --short)
  set_tests_properties(network PROPERTIES RUN_SERIAL ON)
endif()
find_program(python3_program python3)
if(TARGET network AND python3_program AND NOT KVF_SANITIZE)
  kvf_add_test(network_wires network 60 ${python3_program} ${PROJECT_SOURCE_DIR}/tests/network/wires_test.py)
  kvf_add_test(hostile_judging hostile 60 ${python3_program} ${PROJECT_SOURCE_DIR}/tests/hostile/judging_test.py)
endif()

# Tests of the source tree and of the installed library. A sanitized library is not installed.
kvf_add_test(rooms_include_one_way tree 60 bash ${PROJECT_SOURCE_DIR}/tests/install/rooms.sh
             ${PROJECT_SOURCE_DIR})
if(KVF_BUILDS_AGENT AND NOT KVF_SANITIZE)
  kvf_add_test(files_call_one_way tree 60 bash ${PROJECT_SOURCE_DIR}/tests/install/calls.sh
               ${PROJECT_BINARY_DIR}/CMakeFiles/kvferry_objects.dir/src agent link port simulate)
endif()
if(NOT KVF_SANITIZE)
  file(GLOB driver_headers ${PROJECT_SOURCE_DIR}/build/nvrtc/driver-*)
  if(driver_headers)
    kvf_add_test(driver_names tree 60 bash ${PROJECT_SOURCE_DIR}/tests/install/driver_names.sh ${PROJECT_SOURCE_DIR}
                 ${CMAKE_C_COMPILER} ${driver_headers})
  else()
    message(STATUS "Without the test driver_names: no header of the driver (scripts/device-compiler)")
  endif()
  kvf_add_test(headers_stand_alone install 120 bash ${PROJECT_SOURCE_DIR}/tests/install/headers.sh
               ${PROJECT_SOURCE_DIR}/include ${CMAKE_C_COMPILER})
  kvf_add_test(exported_symbols install 60 bash ${PROJECT_SOURCE_DIR}/tests/install/exports.sh
               $<TARGET_FILE:kvferry> $<TARGET_FILE:kvferry_static> ${PROJECT_SOURCE_DIR}/include
               ${KVF_ABSENT_HEADERS})
  if(KVF_BUILDS_AGENT)
    kvf_add_test(recorded_interface install 120 bash ${PROJECT_SOURCE_DIR}/tests/install/abi.sh check
                 ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/tests/install/abi/kvferry.abi
                 ${CMAKE_C_COMPILER})
  endif()
  kvf_add_test(installed_package install 300 bash ${PROJECT_SOURCE_DIR}/tests/install/consume.sh
               ${PROJECT_BINARY_DIR} ${CMAKE_COMMAND} ${CMAKE_C_COMPILER})
endif()

# The longest tests begin first, so that the last one does not run alone for minutes.
foreach(name transport_conformance_test stage_flow_test stage_flow_workers faults.faults faults.faults_packed
             faults.faults_devices faults.faults_spoiled
             transport_faults_test transport_messages_test transport_fence_test agent_pace_test
             integration.demo_failures integration.demo_hybrids)
  if(TEST ${name})
    set_tests_properties(${name} PROPERTIES COST 1000)
  endif()
endforeach()
