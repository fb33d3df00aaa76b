# make             builds what this machine allows: train_gpt_cpu, tokenize, and train_gpt where nvcc is; prints what it found
# make quickstart  small dataset, training, loss, sample text          make test      all tests that need no GPU, under prove
# make test-gpu    all tests that need a GPU: every CUDA op against the CPU reference, whole runs, both on every path
# make sanitize-gpu  small runs of the CUDA program under compute-sanitizer
# make check T=test_ops FILTER=qkv   builds and runs one test: a C test (FILTER: only its parts with that in their names), train.t, gpu/cpu.t,
#                  test_ops_gpu (ARGS=--portable: arguments of the test)
# make install PREFIX=/usr/local   programs, tools for runs (as train_gpt_compare, ...), man page, completions of bash and zsh; DESTDIR=;
#                  make uninstall removes them. MARCH=x86-64-v3 for other machines than this one
# make dist        build/train_gpt-<version>.tar.gz, the commit checked out as a source release
# make fuzz        a minute of fuzzing for every parser                 make bench     CPU throughput beside the PyTorch twin
#
# Overridable: CC, NVCC, GPU_ARCH (native; or 80, 86, 89, 90a, 100a, 103a, 120a, or several: "80 89 90a 100a"), MARCH=native, CUDA_HOME, USE_OPENBLAS=0, USE_SODIUM=0, V=1
#   SANITIZE=address,undefined  CPU program and tests under sanitizers, built in build/*-sanitize
#   DEBUG=1      host code with -O0, in build/*-debug; kernels stay optimised, with line numbers; DEBUG=device: -G for them

SHELL := /bin/bash
CC := gcc
MARCH := native
SANITIZE :=
DEBUG :=
# /usr: Debian's own package of the toolkit.
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda) $(wildcard /opt/cuda) $(patsubst %/bin/nvcc,%,$(shell command -v nvcc 2>/dev/null)))
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
Q := $(if $(V),,@)
comma := ,
JOBS := $(shell nproc 2>/dev/null || echo 2)
# All cores, unless this make was told how many.
SUBMAKE = --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS))

# ---- what is here ------------------------------------------------------------------------------------------------------
# Each probe links a one-line program: headers and libraries are both proved, and no pkg-config is needed.
probe = $(shell printf '$(1)\nint main(void){$(2)}\n' >/tmp/probe$$$$.c; $(CC) /tmp/probe$$$$.c -o /tmp/probe$$$$ $(3) >/dev/null 2>&1 && echo 1; rm -f /tmp/probe$$$$ /tmp/probe$$$$.c)
static_or = $(or $(firstword $(wildcard /usr/lib/$(shell $(CC) -dumpmachine)/lib$(1).a) $(wildcard /usr/lib/lib$(1).a) $(wildcard /usr/lib64/lib$(1).a)),-l$(1))

HAVE_CC := $(call probe,,return 0;)
HAVE_JSON := $(call probe,#include <jansson.h>,json_object();,-ljansson)
HAVE_OPENMP := $(call probe,#include <omp.h>,return omp_get_max_threads()<1;,-fopenmp)
HAVE_PCRE2 := $(call probe,#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>,pcre2_code_free(0);,-lpcre2-8)
ifneq ($(USE_SODIUM),0)
HAVE_SODIUM := $(call probe,#include <sodium.h>,return sodium_init();,-lsodium)
endif
ifneq ($(USE_OPENBLAS),0)
# Where Fedora and SUSE have it.
OPENBLAS_INCLUDE := $(addprefix -I,$(wildcard /usr/include/openblas))
HAVE_OPENBLAS := $(call probe,#include <cblas.h>,return openblas_get_num_threads()<1;,$(OPENBLAS_INCLUDE) -lopenblas)
endif
# What the GPUs of this machine are, with the instructions of their own from Hopper on. Without another word kernels are built for
# them; for Hopper where there is no GPU, or none that can run them.
NATIVE := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$$/\1\2/p' | sort -u | sed 's/^9.$$\|^1..$$/&a/')
GPU_ARCH := $(or $(filter-out 5% 6% 7%,$(NATIVE)),90a)
ifneq ($(NVCC),)
NVCC_RELEASE := $(shell $(NVCC) --version 2>/dev/null | sed -n 's/.*release \([^,]*\),.*/\1/p')
ARCHS := $(foreach a,$(GPU_ARCH),$(if $(filter native,$(a)),$(or $(NATIVE),native),$(a)))
CUDA_INCLUDES := $(filter-out -I/usr/include,$(patsubst %,-I%,$(wildcard $(CUDA_HOME)/include $(CUDA_HOME)/extras/CUPTI/include)))
# Headers are looked for as the compiler does it, CPATH included. Empty: there is none.
header_version = $(shell printf '#include <$(1)>\nversion=$(2)\n' | $(CC) -E -P -x c $(CUDA_INCLUDES) - 2>/dev/null | sed -n 's/ //g; s/^version=//p')
CUDNN_VERSION := $(call header_version,cudnn_version.h,CUDNN_MAJOR.CUDNN_MINOR.CUDNN_PATCHLEVEL)
NCCL_VERSION := $(call header_version,nccl.h,NCCL_MAJOR.NCCL_MINOR.NCCL_PATCH)
HAVE_CUPTI := $(call probe,#include <cupti.h>,CUpti_ActivityKernel9 k; (void)k;,$(CUDA_INCLUDES))
# Folders of libraries that lie elsewhere, as the linker finds them; the programs look there, too. stubs: only to link with.
CUDA_LIB := $(filter-out /usr/lib64 /usr/lib,$(firstword $(wildcard $(CUDA_HOME)/lib64 $(CUDA_HOME)/lib)))
NAMED_LIBS := $(filter-out %/stubs %/stubs/,$(subst :, ,$(LIBRARY_PATH)))
CUDA_LIBS_AT := $(CUDA_LIB) $(foreach d,$(NAMED_LIBS),$(if $(wildcard $(addprefix $(d)/lib,cudnn.so* nccl.so* cublasLt.so* cudart.so*)),$(d))) \
  $(wildcard $(CUDA_HOME)/extras/CUPTI/lib64)
# Python wheels hold libcudnn.so.9 without libcudnn.so.
numbered = $(lastword $(sort $(notdir $(wildcard $(addsuffix /lib$(1).so.[0-9]*,$(CUDA_LIBS_AT))))))
shared_library = $(if $(wildcard $(addsuffix /lib$(1).so,$(CUDA_LIBS_AT))),-l$(1),$(or $(addprefix -l:,$(call numbered,$(1))),-l$(1)))
endif

# ---- flags -------------------------------------------------------------------------------------------------------------
WARN := -Wall -Wextra
OPTIMISE := $(if $(DEBUG),-O0,-O3)
CFLAGS := -std=c11 -D_GNU_SOURCE $(OPTIMISE) -march=$(MARCH) -fno-math-errno -fno-trapping-math -g $(WARN) -I. -MMD -MP
LDLIBS := -lm -lpthread -ldl
ifeq ($(HAVE_OPENMP),1)
CFLAGS += -fopenmp
LDLIBS += -fopenmp
endif
ifeq ($(HAVE_JSON),1)
LDLIBS := $(call static_or,jansson) $(LDLIBS)
endif
ifeq ($(HAVE_PCRE2),1)
CFLAGS += -DHAVE_PCRE2
LDLIBS := $(call static_or,pcre2-8) $(LDLIBS)
endif
ifeq ($(HAVE_SODIUM),1)
CFLAGS += -DHAVE_SODIUM
LDLIBS := $(call static_or,sodium) $(LDLIBS)
endif
ifneq ($(SANITIZE),)
CFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer -fno-sanitize-recover=undefined
LDLIBS += -fsanitize=$(SANITIZE)
endif
CPU_FLAGS := $(if $(HAVE_OPENBLAS),-DHAVE_OPENBLAS $(OPENBLAS_INCLUDE))

CUDA_CFLAGS = $(CFLAGS) -DUSE_CUDA $(CUDA_INCLUDES) $(if $(HAVE_CUPTI),-DHAVE_CUPTI)
NVCC_FLAGS = $(OPTIMISE) -std=c++17 $(if $(DEBUG),-g) $(if $(filter device,$(DEBUG)),-G,-lineinfo) -I. $(CUDA_INCLUDES) $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers
# The kernels were fitted to Hopper's registers with this toolkit: a spill there is an error.
SPILLS = $(if $(filter-out 90a,$(ARCHS))$(filter-out 13.0,$(NVCC_RELEASE))$(filter device,$(DEBUG)),show,refuse)
CUDA_LIBS = $(addprefix -L,$(CUDA_LIBS_AT)) $(addprefix -Wl$(comma)-rpath$(comma),$(CUDA_LIBS_AT)) $(foreach l,cublasLt cudnn cudart,$(call shared_library,$(l)))
REF_CFLAGS = -std=c11 -D_GNU_SOURCE -O3 -march=x86-64-v3 -fPIC -fno-math-errno -fno-trapping-math $(if $(HAVE_OPENMP),-fopenmp) -I. -MMD -MP

# ---- what is built -----------------------------------------------------------------------------------------------------
# Three variants of the same sources: cpu (bf16 storage), exact (fp32 storage, to check the mathematics), cuda.
SUFFIX := $(if $(SANITIZE),-sanitize)$(if $(DEBUG),-debug)
CPU := build/cpu$(SUFFIX)
EXACT := build/exact$(SUFFIX)
CUDA := build/cuda$(if $(DEBUG),-debug)
COMMON_SRC := $(foreach d,base io text data dist ops records model model/blocks optim run,$(wildcard llmc/$(d)/*.c))
CPU_SRC := $(COMMON_SRC) $(wildcard llmc/cpu/*.c)
CUDA_SRC := $(wildcard llmc/cuda/*/*.cu)
CUDA_HOST_SRC := $(COMMON_SRC) $(filter-out llmc/cuda/device/comm_$(if $(NCCL_VERSION),single,nccl).c,$(wildcard llmc/cuda/*/*.c))
TESTS := $(patsubst dev/test/%.c,$(CPU)/%,$(filter-out %_gpu.c,$(wildcard dev/test/test_*.c)))
EXACT_TESTS := $(patsubst dev/test/%.c,$(EXACT)/%,$(wildcard dev/test/exact_*.c))
GPU_TESTS := $(patsubst dev/test/%.c,$(CUDA)/%,$(wildcard dev/test/*_gpu.c))
GPU_BENCHES := $(patsubst dev/bench/%.c,$(CUDA)/%,$(wildcard dev/bench/bench_*.c)) $(patsubst dev/bench/%.cu,$(CUDA)/%,$(wildcard dev/bench/ladder_*.cu dev/bench/bench_*.cu))
REF_SRC := llmc/base/common.c llmc/base/utf8.c llmc/base/memory.c llmc/ops/energy.c llmc/ops/profile.c llmc/ops/qkv_heads.c llmc/optim/newton_schulz.c llmc/optim/ns_options.c $(filter-out %comm_cpu.c,$(wildcard llmc/cpu/*.c))
FUZZERS := $(patsubst dev/fuzz/%.c,build/fuzz/%,$(wildcard dev/fuzz/fuzz_*.c))


.PHONY: all help needed cuda-needed found programs cuda install install-files uninstall dist deps clang-needed quickstart test check test-programs test-gpu test-gpu-programs sanitize-gpu fuzz fuzz-programs bench clean FORCE
.SECONDARY:
all: found programs $(if $(NVCC),cuda)
programs: train_gpt_cpu tokenize order2
help: # the head of this file
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# What no part of the build can do without, in one line: the first thing that any goal with a compiler asks.
needed:
	@$(if $(HAVE_CC),true,echo "$(CC) is missing, or cannot make a program: run scripts/install_deps.sh" >&2; exit 1)
	@$(if $(HAVE_JSON),true,echo "jansson is missing: run scripts/install_deps.sh" >&2; exit 1)
found: needed
	@echo "compiler  $(if $(HAVE_CC),$(shell $(CC) --version | head -n 1))"
	@echo "jansson   yes"
	@echo "OpenMP    $(if $(HAVE_OPENMP),yes,no: one thread only)"
	@echo "OpenBLAS  $(if $(HAVE_OPENBLAS),yes,no: own loops for matrix products - several times slower on the CPU)"
	@echo "libsodium $(if $(HAVE_SODIUM),yes,no: ranks on one machine only)"
	@echo "PCRE2     $(if $(HAVE_PCRE2),yes,no: tokenizer in byte mode only)"
	@echo "nvcc      $(if $(NVCC),$(NVCC_RELEASE) for $(ARCHS:%=sm_%),no: CPU program only)"
	@$(if $(NVCC),echo "cuDNN     $(or $(CUDNN_VERSION),NO: train_gpt needs version 9)"; echo "NCCL      $(or $(NCCL_VERSION),no: train_gpt drives one GPU)"; echo "CUPTI     $(if $(HAVE_CUPTI),yes,no: --profile is refused)",true)

# Files that hold the flags of the last build and change when the flags do: another MARCH, GPU_ARCH or SANITIZE rebuilds.
stamp = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' >$@
$(CPU)/flags $(EXACT)/flags: needed FORCE
	$(call stamp,$(CC) $(CFLAGS) $(CPU_FLAGS))
cuda-needed: needed
	@scripts/check_cuda.sh '$(NVCC)' '$(CUDNN_VERSION)' $(ARCHS)
$(CUDA)/flags: cuda-needed FORCE
	$(call stamp,$(CC) $(CUDA_CFLAGS) $(NVCC_FLAGS))
build/programs: FORCE
	$(call stamp,$(CPU) $(CUDA))

# ---- objects and programs ----------------------------------------------------------------------------------------------
$(CPU)/%.o: %.c $(CPU)/flags
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -c $< -o $@
$(EXACT)/%.o: %.c $(EXACT)/flags
	@mkdir -p $(@D)
	@echo "  cc    $< (fp32)"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -DFLOATX_FP32 -c $< -o $@
$(CUDA)/%.o: %.c $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  cc    $< (cuda)"
	$(Q)$(CC) $(CUDA_CFLAGS) -c $< -o $@
$(CUDA)/%.o: %.cu $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  nvcc  $<"
	$(Q)scripts/no_spills.sh $(SPILLS) $(NVCC) $(NVCC_FLAGS) -MMD -MP -c $< -o $@
# The program's own file holds host code only and is C for all of them.
$(CPU)/train_gpt.o: train_gpt.cu $(CPU)/flags
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -x c -c $< -o $@
$(EXACT)/train_gpt.o: train_gpt.cu $(EXACT)/flags
	@mkdir -p $(@D)
	@echo "  cc    $< (fp32)"
	$(Q)$(CC) $(CFLAGS) $(CPU_FLAGS) -DFLOATX_FP32 -x c -c $< -o $@
$(CUDA)/train_gpt.o: train_gpt.cu $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  cc    $< (cuda)"
	$(Q)$(CC) $(CUDA_CFLAGS) -x c -c $< -o $@

# The whole source goes into the program, and from there into every log. It is no part of the library: it changes with every edit.
build/source_text.c: FORCE
	@mkdir -p build
	@scripts/embed_source.sh $@
build/source_text.o: build/source_text.c
	$(Q)$(CC) -c $< -o $@

$(CPU)/libllmc.a: $(CPU_SRC:%.c=$(CPU)/%.o)
$(EXACT)/libllmc.a: $(CPU_SRC:%.c=$(EXACT)/%.o)
$(CUDA)/libllmc.a: $(CUDA_HOST_SRC:%.c=$(CUDA)/%.o) $(CUDA_SRC:%.cu=$(CUDA)/%.o)
%/libllmc.a:
	@rm -f $@; ar rcs $@ $^

train_gpt train_gpt_cpu $(EXACT)/train_gpt_cpu $(CPU)/test_figures $(CUDA)/test_comm_gpu $(GPU_BENCHES): build/source_text.o
link_cpu = $(Q)$(CC) $(filter %.o %.a,$^) -o $@ -Wl,--build-id $(LDLIBS)
# The self-check is remembered by the build id.
link_cuda = $(Q)$(CXX) $(filter %.o %.a,$^) -o $@ -Wl,--build-id $(CUDA_LIBS) $(LDLIBS)
train_gpt_cpu: $(CPU)/train_gpt.o $(CPU)/libllmc.a build/programs
	$(link_cpu)
$(EXACT)/train_gpt_cpu: $(EXACT)/train_gpt.o $(EXACT)/libllmc.a
	$(link_cpu)
tokenize: $(CPU)/data/tokenize_options.o $(CPU)/data/tokenize_output.o
tokenize order2: %: $(CPU)/data/%.o $(CPU)/libllmc.a build/programs
	$(link_cpu)
$(TESTS) $(CPU)/logits: $(CPU)/%: $(CPU)/dev/test/%.o $(CPU)/libllmc.a
	$(link_cpu)
$(EXACT_TESTS) $(EXACT)/logits: $(EXACT)/%: $(EXACT)/dev/test/%.o $(EXACT)/libllmc.a
	$(link_cpu)

# ---- CUDA --------------------------------------------------------------------------------------------------------------
cuda: train_gpt
train_gpt: $(CUDA)/train_gpt.o $(CUDA)/libllmc.a build/programs
	$(link_cuda)
$(GPU_TESTS): $(CUDA)/%: $(CUDA)/dev/test/%.o $(CUDA)/libllmc.a
	$(link_cuda)
$(GPU_BENCHES): $(CUDA)/%: $(CUDA)/dev/bench/%.o $(CUDA)/libllmc.a
	$(link_cuda)
# The CPU backend as two libraries, bf16 and fp32, which the GPU tests open beside the CUDA one.
build/ref/%.bf16.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(REF_CFLAGS) -c $< -o $@
build/ref/%.fp32.o: %.c
	@mkdir -p $(@D)
	$(Q)$(CC) $(REF_CFLAGS) -DFLOATX_FP32 -c $< -o $@
build/ref/libref_%.so: $(foreach f,$(REF_SRC:%.c=%),build/ref/$(f).%.o)
	$(Q)$(CC) -shared -Wl,-Bsymbolic $^ -o $@ -lm $(if $(HAVE_OPENMP),-fopenmp)
$(foreach v,bf16 fp32,$(eval build/ref/libref_$(v).so: $(foreach f,$(REF_SRC:%.c=%),build/ref/$(f).$(v).o)))
# Stands in for NCCL when the ranks of a test share one GPU.
build/one_gpu/libnccl.so.2: dev/test/one_gpu_nccl.cu
	@mkdir -p $(@D)
	@echo "  nvcc  $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) -shared -cudart shared -Xcompiler -fPIC $< -o $@
# Stands in for CUDA where there is no GPU.
build/no_gpu/no_gpu.so: $(addprefix dev/test/no_gpu/,runtime.c kernels.c products.c no_gpu.h products.h) $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  cc    dev/test/no_gpu"
	$(Q)$(CC) $(CUDA_CFLAGS) -shared -fPIC $(filter %.c,$^) -o $@ -lstdc++
build/no_gpu/refusals: dev/test/no_gpu/refusals.c build/no_gpu/no_gpu.so
	@echo "  cc    $<"
	$(Q)$(CC) $(CUDA_CFLAGS) $(filter %.c %.so,$^) -Wl,-rpath,$(CURDIR)/build/no_gpu -o $@
build/no_gpu/nvml/libnvidia-ml.so.1: dev/test/no_gpu/nvml.c $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(CUDA_CFLAGS) -shared -fPIC $< -o $@
# The CUDA program with its kernels run by the CPU (dev/test/emulate): the same sources, launches as calls.
EMULATED := build/emulated
EMULATED_SRC := $(patsubst %,$(EMULATED)/src/%,$(filter-out llmc/cuda/sm80/%,$(wildcard llmc/cuda/*/*.cu llmc/cuda/*/*.cuh)))
EMULATED_FLAGS = -std=c++17 -O2 -march=$(MARCH) -fopenmp-simd -w -Wno-psabi -DUSE_CUDA -Idev/test/emulate/include -I$(EMULATED)/src -I. $(CUDA_INCLUDES) -MMD -MP
$(EMULATED)/flags: needed FORCE
	$(call stamp,$(CXX) $(EMULATED_FLAGS))
$(EMULATED)/src/%: % dev/test/emulate/transform.pl
	@mkdir -p $(@D)
	@dev/test/emulate/transform.pl $< $@
$(EMULATED)/%.o: $(EMULATED)/src/%.cu $(EMULATED)/flags | $(EMULATED_SRC)
	@mkdir -p $(@D)
	@echo "  c++   $*.cu (emulated)"
	$(Q)$(CXX) $(EMULATED_FLAGS) -include dev/test/emulate/language.h -x c++ -c $< -o $@
$(EMULATED)/launch.o: dev/test/emulate/launch.cc $(EMULATED)/flags
	@mkdir -p $(@D)
	$(Q)$(CXX) $(EMULATED_FLAGS) -U_FORTIFY_SOURCE -c $< -o $@
EMULATED_OBJECTS := $(CUDA_SRC:%.cu=$(EMULATED)/%.o) $(EMULATED)/launch.o $(addprefix $(CUDA)/dev/test/,no_gpu/runtime.o no_gpu/products.o emulate/products.o) $(CUDA_HOST_SRC:%.c=$(CUDA)/%.o)
EMULATED_PROGRAMS := $(addprefix $(EMULATED)/,train_gpt test_ops_gpu test_attention_gpu test_ns_gpu faults)
$(EMULATED)/train_gpt: $(CUDA)/train_gpt.o build/source_text.o
$(filter %_gpu,$(EMULATED_PROGRAMS)): $(EMULATED)/%: $(CUDA)/dev/test/%.o
$(EMULATED)/faults: $(EMULATED)/dev/test/emulate/faults.o
$(EMULATED_PROGRAMS): $(EMULATED_OBJECTS)
	$(Q)$(CXX) $(filter %.o,$^) -o $@ $(addprefix -L,$(CUDA_LIBS_AT)) $(addprefix -Wl$(comma)-rpath$(comma),$(CUDA_LIBS_AT)) $(call shared_library,cudnn) $(LDLIBS)
STAND_IN := build/no_gpu/no_gpu.so build/no_gpu/refusals build/no_gpu/nvml/libnvidia-ml.so.1
REF := build/ref/libref_bf16.so build/ref/libref_fp32.so
test-gpu-programs: train_gpt $(GPU_TESTS) $(REF) $(if $(NCCL_VERSION),build/one_gpu/libnccl.so.2)
test-gpu:
	@$(if $(NVCC),true,echo "make test-gpu: no nvcc here: it needs the CUDA toolkit" >&2; exit 1)
	@scripts/install_deps.sh --required
	@nvidia-smi -L || { echo "make test-gpu: no GPU here" >&2; exit 1; }
	@$(MAKE) $(SUBMAKE) found programs test-gpu-programs
	@BUILD=$(CUDA) dev/test/run gpu
sanitize-gpu:
	@$(if $(NVCC),true,echo "make sanitize-gpu: no nvcc here: it needs the CUDA toolkit, with compute-sanitizer, and a GPU" >&2; exit 1)
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make sanitize-gpu: no GPU here" >&2; exit 1; }
	@scripts/install_deps.sh --required
	@$(MAKE) $(SUBMAKE) train_gpt $(CUDA)/test_attention_gpu $(CUDA)/test_ns_gpu $(REF)
	@BUILD=$(CUDA) dev/test/run one dev/test/gpu/sanitize.pl

# ---- installing, releases -----------------------------------------------------------------------------------------------
PREFIX ?= /usr/local
AT = $(DESTDIR)$(PREFIX)
# Scripts without an ending read runs or make them; the others belong to the source tree.
TOOLS := $(filter-out __pycache__ %.sh %.pm %.py %.slurm,$(notdir $(wildcard scripts/*)))
INSTALLED = $(addprefix bin/,train_gpt_cpu tokenize order2 $(if $(NVCC),train_gpt) $(TOOLS:%=train_gpt_%)) share/man/man1/train_gpt.1 share/man/man1/train_gpt_cpu.1 \
  share/bash-completion/completions/train_gpt share/bash-completion/completions/train_gpt_cpu share/zsh/site-functions/_train_gpt
$(CPU)/manual: $(CPU)/dev/manual.o $(CPU)/libllmc.a
	$(link_cpu)
install: programs $(if $(NVCC),cuda) $(CPU)/manual
	@$(MAKE) --no-print-directory install-files
# What is built, as it is.
install-files:
	@mkdir -p $(addprefix '$(AT)'/,bin share/train_gpt share/man/man1 share/bash-completion/completions share/zsh/site-functions)
	@install -m 755 train_gpt_cpu tokenize order2 $(if $(NVCC),train_gpt) '$(AT)/bin'
	@install -m 755 $(addprefix scripts/,$(TOOLS)) '$(AT)/share/train_gpt'
	@install -m 644 scripts/*.pm scripts/*.py '$(AT)/share/train_gpt'
	@for tool in $(TOOLS); do ln -sf "../share/train_gpt/$$tool" '$(AT)'/bin/train_gpt_$$tool || exit 1; done
	@$(CPU)/manual man >'$(AT)/share/man/man1/train_gpt.1'
	@echo '.so man1/train_gpt.1' >'$(AT)/share/man/man1/train_gpt_cpu.1'
	@$(CPU)/manual bash >'$(AT)/share/bash-completion/completions/train_gpt'
	@ln -sf train_gpt '$(AT)/share/bash-completion/completions/train_gpt_cpu'
	@$(CPU)/manual zsh >'$(AT)/share/zsh/site-functions/_train_gpt'
	@echo "installed in $(AT): $(notdir $(filter bin/%,$(INSTALLED)))"
uninstall:
	@there=$$(cd '$(AT)/bin' 2>/dev/null && ls -d $(sort train_gpt $(notdir $(filter bin/%,$(INSTALLED)))) 2>/dev/null); \
	  rm -rf $(addprefix '$(AT)'/,$(INSTALLED) bin/train_gpt share/train_gpt) && \
	  echo "removed from $(AT):" $${there:-nothing, no program was there}
# A tarball has no git: its file VERSION says what it is, and scripts/embed_source.sh puts that into the program.
dist:
	@git rev-parse --git-dir >/dev/null 2>&1 || { echo "make dist: this is no git checkout" >&2; exit 1; }
	@[ -z "$$(git status --porcelain)" ] || echo "make dist: note: uncommitted changes are not in it" >&2
	@mkdir -p build; v=$$(git describe --tags --always) && echo "$$v, commit $$(git rev-parse HEAD)" >build/VERSION && \
	  git archive --prefix="train_gpt-$$v/" --add-file=build/VERSION HEAD | gzip -n >"build/train_gpt-$$v.tar.gz" && echo "build/train_gpt-$$v.tar.gz"

# ---- the two commands, tests, fuzzing ----------------------------------------------------------------------------------
deps:
	@scripts/install_deps.sh
quickstart:
	@scripts/install_deps.sh --quickstart
	@$(MAKE) $(SUBMAKE) found programs $(if $(and $(NVCC),$(NATIVE)),cuda)
	@scripts/quickstart.sh
test-programs: programs $(TESTS) $(EXACT_TESTS) $(EXACT)/train_gpt_cpu $(CPU)/manual $(CPU)/logits $(EXACT)/logits
test: deps
	@$(MAKE) $(SUBMAKE) found test-programs $(if $(NVCC),cuda $(STAND_IN) $(if $(SANITIZE),,$(EMULATED_PROGRAMS) $(REF)))
	@BUILD=$(CPU) dev/test/run cpu
# One test: T is test_ops, train.t or gpu/cpu.t.
TEST := $(patsubst dev/test/%,%,$(T:.c=))
TEST_PROGRAM := $(firstword $(filter %/$(TEST),$(TESTS) $(EXACT_TESTS) $(GPU_TESTS)))
TEST_SCRIPT := $(wildcard $(addprefix dev/test/,$(filter %.t gpu/%.pl,$(TEST))))
TEST_GPU := $(filter %_gpu gpu/%,$(TEST))
check: needed
	@$(if $(TEST_PROGRAM)$(TEST_SCRIPT),true,echo 'make check: no test "$(T)": T=test_ops, T=train.t, T=gpu/cpu.t (a file of dev/test)' >&2; exit 2)
	@$(if $(and $(TEST_GPU),$(if $(NVCC),,no)),echo "make check: $(T) needs the CUDA toolkit: no nvcc here" >&2; exit 1,true)
	@$(MAKE) $(SUBMAKE) $(or $(TEST_PROGRAM),programs $(EXACT)/train_gpt_cpu $(CPU)/manual $(CPU)/logits $(EXACT)/logits) $(if $(TEST_GPU),$(REF)) $(if $(and $(TEST_GPU),$(TEST_SCRIPT)),test-gpu-programs) $(if $(NVCC),$(if $(filter no_gpu.t,$(TEST)),train_gpt $(STAND_IN)) $(if $(filter emulated.t,$(TEST)),$(EMULATED_PROGRAMS)))
	@BUILD=$(if $(TEST_GPU),$(CUDA),$(CPU)) TEST_FILTER='$(FILTER)' dev/test/run one $(TEST_PROGRAM)$(TEST_SCRIPT) $(ARGS)

CLANG := clang
# An empty target for the fuzzer: headers alone do not prove that clang has its library.
clang-needed:
	@printf 'int LLVMFuzzerTestOneInput(const unsigned char *p, unsigned long n){(void)p; (void)n; return 0;}\n' | \
	  $(CLANG) -fsanitize=fuzzer,address -x c - -o /dev/null 2>/dev/null || \
	  { echo "make fuzz: $(CLANG) with libFuzzer is missing: install clang (Debian: clang libclang-rt-dev)" >&2; exit 1; }
build/fuzz/%: dev/fuzz/%.c $(filter-out llmc/cuda/%,$(CPU_SRC)) | clang-needed
	@mkdir -p $(@D)
	$(CLANG) -std=c11 -D_GNU_SOURCE -O1 -g -I. $(if $(HAVE_PCRE2),-DHAVE_PCRE2) -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
	  -Wno-unknown-pragmas $< $(CPU_SRC) -o $@ -ljansson $(if $(HAVE_PCRE2),-lpcre2-8) -lm -lpthread
fuzz-programs: $(FUZZERS)
FUZZ_SECONDS := 60
fuzz: fuzz-programs
	@set -o pipefail; for f in $(FUZZERS); do echo "== $$f"; mkdir -p build/fuzz/corpus-$$(basename $$f); \
	  $$f -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=4096 -close_fd_mask=3 -artifact_prefix=build/fuzz/ \
	  build/fuzz/corpus-$$(basename $$f) 2>&1 | tail -n 3 || exit 1; done

bench: programs
	dev/bench/throughput.sh
clean:
	rm -rf build train_gpt train_gpt_cpu tokenize order2
FORCE:

-include $(shell find build -name '*.d' 2>/dev/null)
