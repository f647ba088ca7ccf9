# What `make install` puts where: headers, both libraries, the command, its completions, manual pages and schema, and the
# files by which pkg-config and CMake find the library.

include(CMakePackageConfigHelpers)

set(KVF_ZSH_COMPLETIONS ${CMAKE_INSTALL_DATADIR}/zsh/site-functions CACHE STRING "Where zsh looks for completions")
set(KVF_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvferry)

foreach(header IN LISTS KVF_PUBLIC_HEADERS)
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/include ${header})
  get_filename_component(folder ${name} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()
install(TARGETS kvferry EXPORT kvferryTargets)
install(TARGETS kvferry_static EXPORT kvferryStaticTargets)
if(TARGET kvferry_command)
  install(TARGETS kvferry_command)
  set(completion ${PROJECT_SOURCE_DIR}/packaging/completion)
  install(FILES ${completion}/kvferry DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${completion}/_kvferry DESTINATION ${KVF_ZSH_COMPLETIONS})
  install(FILES ${completion}/kvferry.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
  install(FILES ${PROJECT_SOURCE_DIR}/docs/groups.schema.json DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()

file(GLOB man_pages CONFIGURE_DEPENDS docs/man/*.1)
if(man_pages)
  install(FILES ${man_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
endif()
file(GLOB license_files LICENSE NOTICE)
install(FILES ${license_files} DESTINATION ${CMAKE_INSTALL_DOCDIR})

# A program that links the static library must link the library's dependencies too; with the shared one it need not. The
# two are exported apart, so that only users of the static library must have those packages.
install(EXPORT kvferryTargets NAMESPACE kvferry:: DESTINATION ${KVF_CMAKE_DIR})
install(EXPORT kvferryStaticTargets NAMESPACE kvferry:: DESTINATION ${KVF_CMAKE_DIR})
configure_package_config_file(cmake/kvferryConfig.cmake.in ${CMAKE_BINARY_DIR}/kvferryConfig.cmake
                              INSTALL_DESTINATION ${KVF_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvferryConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvferryConfig.cmake ${CMAKE_BINARY_DIR}/kvferryConfigVersion.cmake
        DESTINATION ${KVF_CMAKE_DIR})

# The .pc file names its prefix relative to its own folder, so that a staged or moved tree works unchanged.
file(RELATIVE_PATH KVF_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" KVF_PC_TO_PREFIX "${KVF_PC_TO_PREFIX}")
# Folders may be absolute, too.
file(RELATIVE_PATH KVF_PC_INCLUDEDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
file(RELATIVE_PATH KVF_PC_LIBDIR ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
configure_file(cmake/kvferry.pc.in ${CMAKE_BINARY_DIR}/kvferry.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/kvferry.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
