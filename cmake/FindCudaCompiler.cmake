# Chooses nvcc before enable_language(CUDA), and prepares CMake for the compiler that PyPI's wheels bring.
#
# In:  PIP_CUDA_ROOT or CMAKE_CUDA_COMPILER (-D), the environment's PIP_CUDA_ROOT, CUDACXX, CUDA_HOME and CUDA_PATH,
#      Python_EXECUTABLE
# Out: TSK_CUDA_PROBLEM, empty where a compiler was chosen, else one line that says what is missing
#
# Order: what the user named, the wheels in the same site-packages, nvcc on PATH, /usr/local/cuda. A place that the user
# named and that has no compiler is an error, never skipped.

set(TSK_CUDA_PROBLEM "")

# pip uses a build folder again and again: a compiler that was found, not named, is looked for anew.
if(DEFINED TSK_FOUND_NVCC AND CMAKE_CUDA_COMPILER STREQUAL TSK_FOUND_NVCC)
  unset(CMAKE_CUDA_COMPILER CACHE)
endif()

set(root "${PIP_CUDA_ROOT}")
if(NOT root AND NOT CMAKE_CUDA_COMPILER)
  set(root "$ENV{PIP_CUDA_ROOT}")
endif()
set(nvcc "")
if(root)
  set(nvcc "${root}/bin/nvcc")
  if(NOT EXISTS "${nvcc}")
    message(FATAL_ERROR " PIP_CUDA_ROOT is ${root}, which has no bin/nvcc; expected <site-packages>/nvidia/cu13")
  endif()
elseif(NOT CMAKE_CUDA_COMPILER AND NOT "$ENV{CUDACXX}" STREQUAL "")
  find_program(named "$ENV{CUDACXX}" NO_CACHE)
  if(NOT named)
    message(FATAL_ERROR " CUDACXX is $ENV{CUDACXX}, which is no program; correct it or unset it")
  endif()
  set(nvcc "${named}")
elseif(NOT CMAKE_CUDA_COMPILER)
  foreach(variable CUDA_HOME CUDA_PATH)
    if(NOT nvcc AND NOT "$ENV{${variable}}" STREQUAL "")
      set(nvcc "$ENV{${variable}}/bin/nvcc")
      if(NOT EXISTS "${nvcc}")
        message(FATAL_ERROR " ${variable} is $ENV{${variable}}, which has no bin/nvcc; correct it or unset it")
      endif()
    endif()
  endforeach()
  if(NOT nvcc)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
      OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    find_program(found nvcc PATHS /usr/local/cuda/bin NO_CACHE)
    if(EXISTS "${site_packages}/nvidia/cu13/bin/nvcc")
      set(nvcc "${site_packages}/nvidia/cu13/bin/nvcc")
    elseif(found)
      set(nvcc "${found}")
    else()
      set(TSK_CUDA_PROBLEM "no CUDA compiler (nvcc) was found")
    endif()
  endif()
endif()

if(nvcc)
  if(NOT nvcc STREQUAL "${TSK_FOUND_NVCC}")
    # What CMake wrote down about another compiler.
    file(REMOVE "${CMAKE_BINARY_DIR}/CMakeFiles/${CMAKE_VERSION}/CMakeCUDACompiler.cmake")
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "CUDA compiler" FORCE)
  set(TSK_FOUND_NVCC "${nvcc}" CACHE INTERNAL "The CUDA compiler that was found, not named")
endif()

if(TSK_CUDA_PROBLEM)
  return()
endif()
# The wheels have lib, where nvcc.profile names lib64: without the option not even CMake's test of the compiler links.
file(REAL_PATH "${CMAKE_CUDA_COMPILER}" program)
cmake_path(GET program PARENT_PATH root)
cmake_path(GET root PARENT_PATH root)
if(NOT EXISTS "${root}/lib64" AND root MATCHES "nvidia/cu[0-9]+$")
  foreach(part nvvm/bin/cicc include/crt/host_config.h include/cuda_runtime.h include/cccl lib/libcudart_static.a)
    if(NOT EXISTS "${root}/${part}")
      set(TSK_CUDA_PROBLEM "${root} has nvcc but no ${part}: install all of requirements/cuda.txt")
    endif()
  endforeach()
  string(APPEND CMAKE_CUDA_FLAGS " -L${root}/lib")
endif()
