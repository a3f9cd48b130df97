# Tries the chosen nvcc before enable_language(CUDA), which would end the installation where it does not work: an old
# toolkit, or one that refuses the system's newer g++, must not keep the rest of the package from a machine.
#
# In:  CMAKE_CUDA_COMPILER, CMAKE_CUDA_HOST_COMPILER or the environment's CUDAHOSTCXX, TSK_DEFAULT_ARCHITECTURES
# Out: TSK_CUDA_PROBLEM, empty where nvcc compiles, else one line that says why not

set(TSK_CUDA_PROBLEM "")
set(host "${CMAKE_CUDA_HOST_COMPILER}")
if(NOT host)
  set(host "$ENV{CUDAHOSTCXX}")
endif()
set(attempt "${CMAKE_CUDA_COMPILER} ${host} ${TSK_DEFAULT_ARCHITECTURES}")
if(attempt STREQUAL "${TSK_NVCC_WORKS}")
  return()
endif()

execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" release "${text}")
if(failed OR NOT release)
  set(TSK_CUDA_PROBLEM "${CMAKE_CUDA_COMPILER} does not answer to --version like a CUDA compiler")
elseif(TSK_DEFAULT_ARCHITECTURES AND CMAKE_MATCH_1 VERSION_LESS 12.8)
  set(TSK_CUDA_PROBLEM "${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_MATCH_1}, which cannot compile for 100a and 120; use \
CUDA 12.8 or newer, or name architectures with the environment variable CUDAARCHS")
else()
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/try_nvcc")
  file(WRITE "${folder}/try.cu" "#include <cstdint>\n__global__ void kernel() {}\n")
  set(with_host "")
  if(host)
    set(with_host -ccbin "${host}")
  endif()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" ${with_host} -c try.cu -o try.o
    WORKING_DIRECTORY "${folder}" OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  if(failed)
    string(STRIP "${text}" text)
    string(REGEX REPLACE "[ \n]+" " " text "${text}")
    string(SUBSTRING "${text}" 0 300 text)
    set(TSK_CUDA_PROBLEM "${CMAKE_CUDA_COMPILER} cannot compile: ${text}")
  else()
    set(TSK_NVCC_WORKS "${attempt}" CACHE INTERNAL "The last compiler that was tried with success")
  endif()
endif()
