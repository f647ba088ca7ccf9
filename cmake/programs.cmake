# Folders of small programs: tests, benchmarks, examples. Each .c file with a main() becomes one executable;
# the other .c files of the folder are shared by all of its executables. Where only the core is built, programs
# that include a transport header are left out.

# kvf_add_programs(FOLDER KIND [PUBLIC] [NAMES variable] [NEEDS libraries...])
#
# Makes a target KIND_name (for unit tests: name) for each program of FOLDER, built as
# <build>/<FOLDER>/name. PUBLIC links the shared library and sees the public headers only; otherwise the
# static library, the headers under src/ and the definitions the library was built with. NAMES receives the
# names.
function(kvf_add_programs folder kind)
  cmake_parse_arguments(arg "PUBLIC" "NAMES" "NEEDS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.c)
  set(programs "")
  set(shared_sources "")
  foreach(source IN LISTS sources)
    if(KVF_CORE_ONLY)
      file(STRINGS ${source} transport_lines REGEX "^#include .(kvferry/)?transport[./]" LIMIT_COUNT 1)
      if(transport_lines)
        continue()
      endif()
    endif()
    file(STRINGS ${source} main_lines REGEX "(^|[; ])int main\\(" LIMIT_COUNT 1)
    if(main_lines)
      list(APPEND programs ${source})
    else()
      list(APPEND shared_sources ${source})
    endif()
  endforeach()

  set(names "")
  foreach(source IN LISTS programs)
    get_filename_component(name ${source} NAME_WE)
    list(APPEND names ${name})
    if(kind STREQUAL "unit")
      set(target ${name})
    else()
      set(target ${kind}_${name})
    endif()
    add_executable(${target} ${source} ${shared_sources})
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name}
                                               RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
    target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
    target_link_libraries(${target} PRIVATE ${arg_NEEDS} Threads::Threads m)
    if(arg_PUBLIC)
      target_link_libraries(${target} PRIVATE kvferry)
    else()
      target_link_libraries(${target} PRIVATE kvferry_static PkgConfig::JSONC)
      target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/${folder})
      target_compile_definitions(${target} PRIVATE KVF_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                                                   KVF_VERSION="${PROJECT_VERSION}"
                                                   $<$<BOOL:${KVF_USES_UCX}>:KVF_HAVE_UCX>)
    endif()
  endforeach()
  if(arg_NAMES)
    set(${arg_NAMES} ${names} PARENT_SCOPE)
  endif()
endfunction()
