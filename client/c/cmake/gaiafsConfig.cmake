# find_package(gaiafs) gives the targets gaiafs::gaiafs, the shared library, and gaiafs::static. Neither needs CUDA.
get_filename_component(_gaiafs_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET gaiafs::gaiafs)
  add_library(gaiafs::gaiafs SHARED IMPORTED)
  set_target_properties(gaiafs::gaiafs PROPERTIES
    IMPORTED_LOCATION "${_gaiafs_prefix}/lib/libgaiafs.so.0"
    IMPORTED_SONAME libgaiafs.so.0
    INTERFACE_INCLUDE_DIRECTORIES "${_gaiafs_prefix}/include")

  add_library(gaiafs::static STATIC IMPORTED)
  set_target_properties(gaiafs::static PROPERTIES
    IMPORTED_LOCATION "${_gaiafs_prefix}/lib/libgaiafs.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_gaiafs_prefix}/include"
    INTERFACE_LINK_LIBRARIES "-pthread;-ldl")
endif()

foreach(_gaiafs_file include/gaiafs.h lib/libgaiafs.so.0 lib/libgaiafs.a)
  if(NOT EXISTS "${_gaiafs_prefix}/${_gaiafs_file}")
    set(gaiafs_FOUND FALSE)
    set(gaiafs_NOT_FOUND_MESSAGE "${_gaiafs_prefix}/${_gaiafs_file} is missing: install gaiafs again")
  endif()
endforeach()
unset(_gaiafs_file)
unset(_gaiafs_prefix)
