# Installs the library under its three names, the headers, and what find_package and pkg-config read. CMake cannot
# install an imported target, so the package's target is written by hand in nvbackendConfig.cmake.in.
include(CMakePackageConfigHelpers)

set(folder "${CMAKE_CURRENT_BINARY_DIR}/lib")
set(package "${CMAKE_INSTALL_LIBDIR}/cmake/nvbackend")
install(PROGRAMS "${folder}/libnvbackend.so.${PROJECT_VERSION}" DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES "${folder}/libnvbackend.so.${NVBACKEND_SOVERSION}" "${folder}/libnvbackend.so"
        DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Whoever wants to debug the library or to symbolise a profile installs this too: cmake --install BUILD --component debug
install(FILES "${folder}/libnvbackend.so.${PROJECT_VERSION}.debug" DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT debug
        EXCLUDE_FROM_ALL)
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# What the header names and what users of the library read is installed, the pages for those who change it are not.
install(FILES LICENSE-APACHE LICENSE-MIT CHANGELOG.md SECURITY.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES docs/configuration.md docs/engines.md docs/errors.md docs/memory.md docs/tuning.md docs/weights.md
        DESTINATION ${CMAKE_INSTALL_DOCDIR}/docs)
install(PROGRAMS tools/memory_timeline.py DESTINATION ${CMAKE_INSTALL_DATADIR}/nvbackend/tools)
# For the archives of tools/dist.sh, whose users have no checkout: cmake --install BUILD --component examples
install(DIRECTORY cpp_examples/ DESTINATION ${CMAKE_INSTALL_DATADIR}/nvbackend/examples COMPONENT examples EXCLUDE_FROM_ALL)

# The API's pages are made from the header. Nothing else of the build needs Python, so without it they are left out.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(Python3_FOUND)
  set(pages "${CMAKE_CURRENT_BINARY_DIR}/api")
  set(header "${CMAKE_CURRENT_SOURCE_DIR}/include/nvbackend.h")
  set(script "${CMAKE_CURRENT_SOURCE_DIR}/tools/api_pages.py")
  add_custom_command(OUTPUT "${pages}/index.html" COMMAND Python3::Interpreter "${script}" "${pages}" "${header}"
                     DEPENDS "${header}" "${script}" COMMENT "Writing the API's pages" VERBATIM)
  add_custom_target(nvbackend_api_pages ALL DEPENDS "${pages}/index.html")
  install(DIRECTORY "${pages}/" DESTINATION ${CMAKE_INSTALL_DOCDIR}/api)
else()
  message(STATUS "nvbackend ${PROJECT_VERSION}: the API's pages are left out, because there is no Python")
endif()

# Until 1.0 a minor release may break the ABI, so that 0.2 does not satisfy a request for 0.1.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(compatibility SameMinorVersion)
else()
  set(compatibility SameMajorVersion)
endif()
configure_package_config_file(cmake/nvbackendConfig.cmake.in nvbackendConfig.cmake INSTALL_DESTINATION ${package}
                              PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(nvbackendConfigVersion.cmake COMPATIBILITY ${compatibility})
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/nvbackendConfig.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/nvbackendConfigVersion.cmake" DESTINATION ${package})

# The prefix is written relative to the .pc file, so that an installed tree can be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(pkgconfig_prefix "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH upwards "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" pkgconfig_prefix "\${pcfiledir}/${upwards}")
endif()
foreach(kind LIBDIR INCLUDEDIR)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${kind}}")
    set(pkgconfig_${kind} "${CMAKE_INSTALL_${kind}}")
  else()
    set(pkgconfig_${kind} "\${prefix}/${CMAKE_INSTALL_${kind}}")
  endif()
endforeach()
configure_file(cmake/nvbackend.pc.in nvbackend.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/nvbackend.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall
    COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_CURRENT_BINARY_DIR}
            -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/NvbackendUninstall.cmake
    COMMENT "Removing what was installed" USES_TERMINAL VERBATIM)
endif()
