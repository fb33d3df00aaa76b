# make             builds what this machine allows: train_gpt_cpu, tokenize, and train_gpt where nvcc is; prints what it found
# make quickstart  small dataset, training, loss, sample text          make test      all tests, under prove
# make test-gpu    every CUDA op against the CPU reference             make fuzz      a minute of fuzzing for every parser
# make bench       CPU throughput beside the PyTorch twin
#
# Overridable: CC, NVCC, GPU_ARCH=90a (80, 89, 90a, 100a), SANITIZE=address,undefined, MARCH=native, CUDA_HOME, USE_MPI=0, USE_OPENBLAS=0, V=1

SHELL := /bin/bash
CC := gcc
MARCH := native
SANITIZE :=
GPU_ARCH := 90a
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda) $(wildcard /opt/cuda))
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
Q := $(if $(V),,@)

# ---- what is here ------------------------------------------------------------------------------------------------------
# Each probe links a one-line program: headers and libraries are both proved, and no pkg-config is needed.
probe = $(shell printf '$(1)\nint main(void){$(2)}\n' >/tmp/probe$$$$.c; $(CC) /tmp/probe$$$$.c -o /tmp/probe$$$$ $(3) >/dev/null 2>&1 && echo 1; rm -f /tmp/probe$$$$ /tmp/probe$$$$.c)
static_or = $(or $(firstword $(wildcard /usr/lib/$(shell $(CC) -dumpmachine)/lib$(1).a) $(wildcard /usr/lib/lib$(1).a) $(wildcard /usr/lib64/lib$(1).a)),-l$(1))

HAVE_JSON := $(call probe,#include <json-c/json.h>,json_object_new_object();,-ljson-c)
HAVE_OPENMP := $(call probe,#include <omp.h>,return omp_get_max_threads()<1;,-fopenmp)
HAVE_PCRE2 := $(call probe,#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>,pcre2_code_free(0);,-lpcre2-8)
ifneq ($(USE_OPENBLAS),0)
HAVE_OPENBLAS := $(call probe,#include <cblas.h>,return openblas_get_num_threads()<1;,-lopenblas)
endif
ifneq ($(USE_MPI),0)
MPICC := $(shell command -v mpicc 2>/dev/null)
HAVE_MPI := $(if $(MPICC),$(call probe,#include <mpi.h>,MPI_Finalize();,$(shell mpicc --showme:compile 2>/dev/null) $(shell mpicc --showme:link 2>/dev/null || echo -lmpi)))
endif
CUDA_LIB := $(firstword $(wildcard $(CUDA_HOME)/lib64) $(wildcard $(CUDA_HOME)/lib))
CUDNN_DIR := $(firstword $(foreach d,$(CUDA_HOME)/include /usr/include /usr/include/x86_64-linux-gnu,$(if $(wildcard $(d)/cudnn.h),$(d))))
NCCL_DIR := $(firstword $(foreach d,$(CUDA_HOME)/include /usr/include /usr/include/x86_64-linux-gnu,$(if $(wildcard $(d)/nccl.h),$(d))))

# ---- flags -------------------------------------------------------------------------------------------------------------
WARN := -Wall -Wextra
CFLAGS := -std=c11 -D_GNU_SOURCE -O3 -march=$(MARCH) -fno-math-errno -fno-trapping-math -g $(WARN) -I. -MMD -MP
LDLIBS := -lm -lpthread -ldl
ifeq ($(HAVE_OPENMP),1)
CFLAGS += -fopenmp
LDLIBS += -fopenmp
endif
ifeq ($(HAVE_JSON),1)
LDLIBS := $(call static_or,json-c) $(LDLIBS)
endif
ifeq ($(HAVE_PCRE2),1)
CFLAGS += -DHAVE_PCRE2
LDLIBS := $(call static_or,pcre2-8) $(LDLIBS)
endif
ifneq ($(SANITIZE),)
CFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=undefined
LDLIBS += -fsanitize=$(SANITIZE)
endif
CPU_FLAGS := $(if $(HAVE_OPENBLAS),-DHAVE_OPENBLAS) $(if $(HAVE_MPI),-DHAVE_MPI $(shell mpicc --showme:compile 2>/dev/null))
CPU_LIBS := $(if $(HAVE_OPENBLAS),-lopenblas) $(if $(HAVE_MPI),$(shell mpicc --showme:link 2>/dev/null || echo -lmpi))

# ---- what is built -----------------------------------------------------------------------------------------------------
# Three variants of the same sources: cpu (bf16 storage), exact (fp32 storage, to check the mathematics), cuda.
SUFFIX := $(if $(SANITIZE),-sanitize)
CPU := build/cpu$(SUFFIX)
EXACT := build/exact$(SUFFIX)
CUDA := build/cuda
COMMON_SRC := $(wildcard llmc/*.c)
CPU_SRC := $(COMMON_SRC) $(wildcard llmc/cpu/*.c)
CUDA_SRC := $(wildcard llmc/cuda/*.cu)
CUDA_HOST_SRC := $(COMMON_SRC) $(wildcard llmc/cuda/*.c)
TESTS := $(patsubst dev/test/%.c,$(CPU)/%,$(wildcard dev/test/test_*.c))
EXACT_TESTS := $(patsubst dev/test/%.c,$(EXACT)/%,$(wildcard dev/test/exact_*.c))
SCRIPT_TESTS := $(wildcard dev/test/*.t)
FUZZERS := $(patsubst dev/fuzz/%.c,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.c))

.PHONY: all found deps quickstart test test-programs test-gpu fuzz bench clean cuda cuda-tests
.SECONDARY:
all: found train_gpt_cpu tokenize $(if $(NVCC),cuda)

found:
	@echo "compiler  $(shell $(CC) --version | head -n 1)"
	@echo "json-c    $(if $(HAVE_JSON),yes,NO: needed for checkpoints; scripts/install_deps.sh installs it)"
	@echo "OpenMP    $(if $(HAVE_OPENMP),yes,no: one thread only)"
	@echo "OpenBLAS  $(if $(HAVE_OPENBLAS),yes,no: own loops for matrix products - several times slower on the CPU)"
	@echo "MPI       $(if $(HAVE_MPI),yes,no: train_gpt_cpu runs as one rank)"
	@echo "PCRE2     $(if $(HAVE_PCRE2),yes,no: tokenizer in byte mode only)"
	@echo "nvcc      $(if $(NVCC),$(shell $(NVCC) --version | sed -n 's/.*release \([^,]*\),.*/\1/p') for sm_$(GPU_ARCH),no: CPU program only)"
	@$(if $(NVCC),echo "cuDNN     $(if $(CUDNN_DIR),$(CUDNN_DIR),no)"; echo "NCCL      $(if $(NCCL_DIR),$(NCCL_DIR),no)")
	@$(if $(HAVE_JSON),,echo "json-c is missing; run scripts/install_deps.sh" >&2; exit 1)

# One pattern for each variant: objects, then programs.
$(CPU)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -c $< -o $@
$(EXACT)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  cc    $< (fp32)"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -DFLOATX_FP32 -c $< -o $@
$(CPU)/train_gpt.o $(EXACT)/train_gpt.o: train_gpt.cu
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) $(if $(findstring exact,$@),-DFLOATX_FP32) -x c -c $< -o $@
$(CPU)/libllmc.a: $(CPU_SRC:%.c=$(CPU)/%.o)
$(EXACT)/libllmc.a: $(CPU_SRC:%.c=$(EXACT)/%.o)
%/libllmc.a:
	@rm -f $@; ar rcs $@ $^
train_gpt_cpu: $(CPU)/train_gpt_cpu
	@cp $< $@
$(CPU)/train_gpt_cpu: $(CPU)/train_gpt.o $(CPU)/libllmc.a
	$(Q)$(CC) $^ -o $@ $(CPU_LIBS) $(LDLIBS)
$(EXACT)/train_gpt_cpu: $(EXACT)/train_gpt.o $(EXACT)/libllmc.a
	$(Q)$(CC) $^ -o $@ $(CPU_LIBS) $(LDLIBS)
tokenize: $(CPU)/data/tokenize.o $(CPU)/libllmc.a
	$(Q)$(CC) $^ -o $@ $(CPU_LIBS) $(LDLIBS)
$(CPU)/%: $(CPU)/dev/test/%.o $(CPU)/libllmc.a
	$(Q)$(CC) $^ -o $@ $(CPU_LIBS) $(LDLIBS)
$(EXACT)/%: $(EXACT)/dev/test/%.o $(EXACT)/libllmc.a
	$(Q)$(CC) $^ -o $@ $(CPU_LIBS) $(LDLIBS)
