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

  # How every target of the folder is compiled.
  if(arg_PUBLIC)
    set(libraries kvferry)
    set(folders "")
    set(definitions _GNU_SOURCE)
  else()
    set(libraries kvferry_static PkgConfig::JSONC)
    set(folders ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/${folder})
    set(definitions _GNU_SOURCE KVF_SOURCE_DIR="${PROJECT_SOURCE_DIR}" KVF_VERSION="${PROJECT_VERSION}")
    if(KVF_USES_UCX)
      list(APPEND definitions KVF_HAVE_UCX)
    endif()
  endif()
  list(APPEND libraries ${arg_NEEDS} Threads::Threads m)

  if(shared_sources)
    add_library(${kind}_shared STATIC ${shared_sources})
    set_target_properties(${kind}_shared PROPERTIES OUTPUT_NAME shared
                                                    ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
    target_include_directories(${kind}_shared PRIVATE ${folders})
    target_compile_definitions(${kind}_shared PRIVATE ${definitions})
    target_link_libraries(${kind}_shared PRIVATE ${libraries})
    list(PREPEND libraries ${kind}_shared)
  endif()

  set(names "")
  foreach(source IN LISTS programs)
    get_filename_component(name ${source} NAME_WE)
    list(APPEND names ${name})
    if(kind STREQUAL "unit")
      set(target ${name})
    else()
      set(target ${kind}_${name})
    endif()
    add_executable(${target} ${source})
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name}
                                               RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
    target_include_directories(${target} PRIVATE ${folders})
    target_compile_definitions(${target} PRIVATE ${definitions})
    target_link_libraries(${target} PRIVATE ${libraries})
  endforeach()
  if(arg_NAMES)
    set(${arg_NAMES} ${names} PARENT_SCOPE)
  endif()
endfunction()
