# find_package(gaiafs) gives the targets gaiafs::gaiafs, the shared library, and gaiafs::static. Neither needs CUDA.
get_filename_component(_gaiafs_libraries "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
get_filename_component(_gaiafs_prefix "${_gaiafs_libraries}/.." ABSOLUTE)

if(NOT TARGET gaiafs::gaiafs)
  add_library(gaiafs::gaiafs SHARED IMPORTED)
  set_target_properties(gaiafs::gaiafs PROPERTIES
    IMPORTED_LOCATION "${_gaiafs_libraries}/libgaiafs.so.0"
    IMPORTED_SONAME libgaiafs.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_gaiafs_prefix}/include")

  add_library(gaiafs::static STATIC IMPORTED)
  set_target_properties(gaiafs::static PROPERTIES
    IMPORTED_LOCATION "${_gaiafs_libraries}/libgaiafs.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_gaiafs_prefix}/include"
    INTERFACE_LINK_LIBRARIES "-pthread;-ldl")
endif()

foreach(_gaiafs_file "${_gaiafs_prefix}/include/gaiafs.h" "${_gaiafs_libraries}/libgaiafs.so.0"
    "${_gaiafs_libraries}/libgaiafs.a")
  if(NOT EXISTS "${_gaiafs_file}")
    set(gaiafs_FOUND FALSE)
    set(gaiafs_NOT_FOUND_MESSAGE "${_gaiafs_file} is missing: install gaiafs again")
  endif()
endforeach()
unset(_gaiafs_file)
unset(_gaiafs_libraries)
unset(_gaiafs_prefix)
