# Device code: src/cuda/kernels.cu, compiled by NVRTC (scripts/device-compiler downloads it) and embedded. A library
# that was built without NVRTC has none, and says so when a caller wants to use a device.

set(KVF_NVRTC AUTO CACHE STRING "libnvrtc.so.12, which compiles device code: a file, AUTO (where it is found) or OFF")

# kvf_embed_device_code(VARIABLE): appends the C file with the device code to the list.
function(kvf_embed_device_code variable)
  set(compiler ${KVF_NVRTC})
  if(compiler STREQUAL "AUTO")
    file(GLOB found ${PROJECT_SOURCE_DIR}/build/nvrtc/libnvrtc.so.12 /usr/local/cuda/lib64/libnvrtc.so.12)
    list(APPEND found OFF)
    list(GET found 0 compiler)
  elseif(NOT compiler STREQUAL "OFF" AND NOT EXISTS ${compiler})
    message(FATAL_ERROR "KVF_NVRTC is ${compiler}; allowed: AUTO, OFF, or a file")
  endif()
  if(CMAKE_CROSSCOMPILING)
    set(compiler OFF) # the program below would not run
  endif()
  if(compiler STREQUAL "OFF")
    message(STATUS "Without device code: libnvrtc.so.12 is not found (scripts/device-compiler)")
    set(arguments --none)
  else()
    set(arguments ${compiler} ${PROJECT_SOURCE_DIR}/src)
    get_filename_component(folder ${compiler} DIRECTORY)
  endif()
  set(output ${PROJECT_BINARY_DIR}/generated/device_code.c)
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/generated) # Ninja makes the folders of outputs, make does not
  add_executable(device_code tools/device/device_code.c)
  target_compile_definitions(device_code PRIVATE _GNU_SOURCE)
  target_link_libraries(device_code PRIVATE ${CMAKE_DL_LIBS})
  set_target_properties(device_code PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tools)
  set(sources cuda/kernels.cu cuda/kernel_move.h cuda/kernel_hash.h cuda/kernel_boxes.h kernel/convert_bits.h)
  list(TRANSFORM sources PREPEND ${PROJECT_SOURCE_DIR}/src/)
  add_custom_command(OUTPUT ${output}
    # Leaks in this program do not matter. NVRTC loads a second library from its own folder, but a sanitizer's dlopen()
    # does not look there.
    COMMAND ${CMAKE_COMMAND} -E env ASAN_OPTIONS=detect_leaks=0 LD_LIBRARY_PATH=${folder}
            $<TARGET_FILE:device_code> ${arguments} ${output}
    DEPENDS device_code ${sources}
    COMMENT "Compiling device code" VERBATIM)
  set(${variable} ${${variable}} ${output} PARENT_SCOPE)
endfunction()
