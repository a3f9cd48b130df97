# Chooses nvcc before enable_language(CUDA), and prepares CMake for the compiler that PyPI's wheels bring.
#
# In:  PIP_CUDA_ROOT, CMAKE_CUDA_COMPILER (cache or environment: CUDACXX), CUDA_HOME, CUDA_PATH, Python_EXECUTABLE
# Out: TSK_CUDA_PROBLEM, empty where a compiler was chosen, else one line that says what is missing
#
# Order: what the user named, the wheels in the same site-packages, nvcc on PATH, /usr/local/cuda. A place that the user
# named and that has no compiler is an error, never skipped.

set(TSK_CUDA_PROBLEM "")

# A cached compiler that has gone (another virtual environment) would stop CMake: look again.
if(DEFINED CACHE{CMAKE_CUDA_COMPILER} AND NOT EXISTS "${CMAKE_CUDA_COMPILER}")
  unset(CMAKE_CUDA_COMPILER CACHE)
  file(REMOVE_RECURSE "${CMAKE_BINARY_DIR}/CMakeFiles/${CMAKE_VERSION}")
endif()

if(NOT PIP_CUDA_ROOT AND NOT "$ENV{PIP_CUDA_ROOT}" STREQUAL "")
  set(PIP_CUDA_ROOT "$ENV{PIP_CUDA_ROOT}")
endif()
if(PIP_CUDA_ROOT)
  if(NOT EXISTS "${PIP_CUDA_ROOT}/bin/nvcc")
    message(FATAL_ERROR "PIP_CUDA_ROOT is ${PIP_CUDA_ROOT}, which has no bin/nvcc; expected <site-packages>/nvidia/cu13")
  endif()
elseif(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
  foreach(variable CUDA_HOME CUDA_PATH)
    if(NOT "$ENV{${variable}}" STREQUAL "" AND NOT CMAKE_CUDA_COMPILER)
      if(NOT EXISTS "$ENV{${variable}}/bin/nvcc")
        message(FATAL_ERROR "${variable} is $ENV{${variable}}, which has no bin/nvcc; correct it or unset it")
      endif()
      set(CMAKE_CUDA_COMPILER "$ENV{${variable}}/bin/nvcc" CACHE FILEPATH "nvcc")
    endif()
  endforeach()
  if(NOT CMAKE_CUDA_COMPILER)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
      OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    if(EXISTS "${site_packages}/nvidia/cu13/bin/nvcc")
      set(PIP_CUDA_ROOT "${site_packages}/nvidia/cu13")
    endif()
  endif()
endif()

if(PIP_CUDA_ROOT)
  foreach(part nvvm/bin/cicc include/crt/host_config.h include/cuda_runtime.h include/cccl lib/libcudart_static.a)
    if(NOT EXISTS "${PIP_CUDA_ROOT}/${part}")
      set(TSK_CUDA_PROBLEM "${PIP_CUDA_ROOT} has nvcc but no ${part}: install all of requirements/cuda.txt")
    endif()
  endforeach()
  set(CMAKE_CUDA_COMPILER "${PIP_CUDA_ROOT}/bin/nvcc" CACHE FILEPATH "nvcc of the PyPI wheels" FORCE)
  # nvcc.profile names lib64 but the wheels have lib: without this not even CMake's test of the compiler links.
  string(APPEND CMAKE_CUDA_FLAGS " -L${PIP_CUDA_ROOT}/lib")
elseif(NOT CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
  find_program(TSK_NVCC nvcc HINTS /usr/local/cuda/bin NO_CACHE)
  if(TSK_NVCC)
    set(CMAKE_CUDA_COMPILER "${TSK_NVCC}" CACHE FILEPATH "nvcc")
  else()
    set(TSK_CUDA_PROBLEM "no CUDA compiler (nvcc) was found")
  endif()
endif()
