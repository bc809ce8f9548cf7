// A library with the functions of hipRTC, which notes each compilation in the file $STUB_LOG. Its code is the name of
// the architecture; architecture "broken" fails with a log.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char arch[64];

const char *hiprtcGetErrorString(int status) { return status == 6 ? "HIPRTC_ERROR_COMPILATION" : "HIPRTC_SUCCESS"; }

int hiprtcVersion(int *major, int *minor) {
    *major = 7, *minor = 1;
    return 0;
}

int hiprtcCreateProgram(void **program, const char *source, const char *name, int headers, const char **texts,
                        const char **names) {
    *program = strstr(source, "hdma_reduce_") && *name && !headers && !texts && !names ? arch : NULL;
    return *program == NULL;
}

int hiprtcCompileProgram(void *program, int count, const char **options) {
    (void)program;
    FILE *log = fopen(getenv("STUB_LOG"), "a");
    for (int i = 0; i < count; ++i) {
        sscanf(options[i], "--offload-arch=%63s", arch);
        fprintf(log, "%s%s", options[i], i + 1 < count ? " " : "\n");
    }
    fclose(log);
    if (getenv("STUB_SLOW")) usleep(300 * 1000);
    return strcmp(arch, "broken") ? 0 : 6;
}

int hiprtcGetProgramLogSize(void *program, size_t *size) { return (void)program, *size = 13, 0; }
int hiprtcGetProgramLog(void *program, char *log) { return (void)program, strcpy(log, "line 7: sigh"), 0; }
int hiprtcGetCodeSize(void *program, size_t *size) { return (void)program, *size = strlen(arch), 0; }
int hiprtcGetCode(void *program, char *code) { return (void)program, memcpy(code, arch, strlen(arch)), 0; }
int hiprtcDestroyProgram(void **program) { return *program = NULL, 0; }
