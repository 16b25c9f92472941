/* The version of Linnet, for C and C++; CMake and pip read it here. Public headers do not break within a major version. */
#ifndef LINNET_VERSION_H_
#define LINNET_VERSION_H_

#define LINNET_VERSION "0.1.0"
#define LINNET_VERSION_MAJOR 0
#define LINNET_VERSION_MINOR 1
#define LINNET_VERSION_PATCH 0

#endif
