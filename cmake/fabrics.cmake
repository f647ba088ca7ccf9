# Fabrics over libraries that are loaded at run time. The build needs only the headers, of any version that may be
# loaded, and leaves a fabric out without them.

# kvf_fabric_option(NAME TITLE): the option KVF_WITH_NAME.
function(kvf_fabric_option name title)
  set(KVF_WITH_${name} AUTO CACHE STRING
      "Build the ${title} transport, which loads ${title} at run time: AUTO (where its headers are found), ON or OFF")
  set_property(CACHE KVF_WITH_${name} PROPERTY STRINGS AUTO ON OFF)
  if(NOT KVF_WITH_${name} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "KVF_WITH_${name} is ${KVF_WITH_${name}}; allowed: AUTO, ON, OFF")
  endif()
endfunction()

# The two numbers of a version, which a header defines in lines that are like the pattern: "1.17".
function(kvf_version_in header pattern variable)
  file(STRINGS ${header} found REGEX "define ${pattern} ")
  string(REGEX REPLACE ".* ([0-9]+);.* ([0-9]+)$" "\\1.\\2" found "${found}")
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()

# kvf_find_fabric(NAME TITLE title MODULE module HEADER header VERSION_HEADER header VERSION pattern DEBIAN package)
#
# Finds the headers of the library, whose .pc file is MODULE, and sets KVF_USES_NAME. The folder of the fabric is NAME
# in small letters; its header defines the oldest version, KVF_NAME_MAJOR and KVF_NAME_MINOR_MIN. What is compiled with
# the headers needs what this adds to KVF_FABRIC_DEFINITIONS and KVF_FABRIC_FOLDERS; the folder of a fabric that is left
# out is added to KVF_ABSENT_FABRICS.
function(kvf_find_fabric name)
  cmake_parse_arguments(arg "" "TITLE;MODULE;HEADER;VERSION_HEADER;VERSION;DEBIAN" "" ${ARGN})
  string(TOLOWER ${name} folder)
  set(problem "")
  if(KVF_CORE_ONLY OR KVF_WITH_${name} STREQUAL "OFF")
    set(problem "it was not asked for")
  else()
    kvf_version_in(${PROJECT_SOURCE_DIR}/src/transport/${folder}/${folder}.h "KVF_${name}_M(AJOR|INOR_MIN)" oldest)
    pkg_check_modules(${name} QUIET ${arg_MODULE})
    find_path(KVF_${name}_HEADERS ${arg_HEADER} HINTS ${${name}_INCLUDE_DIRS}
              DOC "Folder with the headers of ${arg_TITLE}")
    set(headers "${KVF_${name}_HEADERS}")
    if(NOT headers)
      set(problem "${arg_HEADER} is not found (Debian: ${arg_DEBIAN})")
    else()
      kvf_version_in(${headers}/${arg_VERSION_HEADER} "${arg_VERSION}" found)
      if(found VERSION_LESS oldest)
        set(problem "${headers} has the headers of ${arg_TITLE} ${found}; needed are those of ${oldest} or later")
      endif()
    endif()
    if(problem AND KVF_WITH_${name} STREQUAL "ON")
      message(FATAL_ERROR "KVF_WITH_${name} is ON, but ${problem}")
    elseif(problem)
      message(STATUS "Without the ${arg_TITLE} transport: ${problem}")
    endif()
  endif()
  if(problem)
    set(KVF_USES_${name} OFF PARENT_SCOPE)
    set(KVF_ABSENT_FABRICS ${KVF_ABSENT_FABRICS} transport/${folder} PARENT_SCOPE)
  else()
    set(KVF_USES_${name} ON PARENT_SCOPE)
    set(KVF_FABRIC_DEFINITIONS ${KVF_FABRIC_DEFINITIONS} KVF_HAVE_${name} PARENT_SCOPE)
    set(KVF_FABRIC_FOLDERS ${KVF_FABRIC_FOLDERS} ${headers} PARENT_SCOPE)
  endif()
endfunction()
