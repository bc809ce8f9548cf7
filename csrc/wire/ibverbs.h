// wire/ibverbs: what hdma needs of libibverbs, declared here and loaded at run time: a build needs no RDMA headers, and
// an installation no RDMA packages.
//
// Protocol: load() finds libibverbs.so.1 and its versioned symbols. The structures are the library's binary interface
// (rdma-core's libibverbs/verbs.h, unchanged for these since 2008 but for fields added at their ends), and stay so by
// its symbol versions; tests/programs/ibverbs_abi.cc compares them with the header where that is installed. Posting
// and polling have no symbols: they are calls through a context's table.
//
// Threading: load() from any thread; the rest as libibverbs: all of it is thread-safe.
//
// Ordering: none of its own.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace hdma::ibv {

struct Device;

struct Context;
struct Pd {
    Context *context;
};
struct Channel {
    Context *context;
    int fd;
};
struct Cq {
    Context *context;
};
struct Mr {
    Context *context;
    Pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

enum QpState : uint32_t { kReset, kInit, kReadyToReceive, kReadyToSend, kDraining, kSendError, kError };
enum QpType : uint32_t { kReliable = 2 };

struct Qp {
    Context *context;
    void *qp_context;
    Pd *pd;
    Cq *send_cq, *recv_cq;
    void *srq;
    uint32_t handle, qp_num;
};

// Status of a completion; ibv_wc_status_str has the words.
enum Status : uint32_t { kSuccess = 0, kFlushed = 5, kRemoteAccess = 10, kRetriesExceeded = 12 };

struct Completion {
    uint64_t wr_id;
    uint32_t status, opcode, vendor_error, nbytes, immediate, qp_num, source_qp, flags;
    uint16_t pkey_index, source_lid;
    uint8_t service_level, path_bits;
};

struct Piece {  // of memory: a scatter/gather element
    uint64_t addr;
    uint32_t nbytes, lkey;
};

enum Opcode : uint32_t { kWrite = 0, kSend = 2, kRead = 4 };
constexpr uint32_t kSignaled = 1u << 1, kInline = 1u << 3;

struct SendRequest {
    uint64_t wr_id;
    SendRequest *next;
    Piece *pieces;
    int piece_count;
    uint32_t opcode, flags, immediate;
    union {
        struct {
            uint64_t addr;
            uint32_t rkey;
        } remote;
        uint64_t widest[4];  // of the atomics
    };
    uint32_t extended;
    uint64_t more[6];
};

struct ReceiveRequest {
    uint64_t wr_id;
    ReceiveRequest *next;
    Piece *pieces;
    int piece_count;
};

struct ContextOps {
    void *before_poll[11];
    int (*poll_cq)(Cq *, int count, Completion *);
    int (*req_notify_cq)(Cq *, int solicited_only);
    void *before_post[12];
    int (*post_send)(Qp *, SendRequest *, SendRequest **bad);
    int (*post_recv)(Qp *, ReceiveRequest *, ReceiveRequest **bad);
    void *after_post[5];
};

struct Context {
    Device *device;
    ContextOps ops;
    int cmd_fd, async_fd, vector_count;
    pthread_mutex_t mutex;
    void *abi_compat;
};

struct DeviceAttr {
    char firmware[64];
    uint64_t node_guid, system_guid, max_mr_size, page_sizes;
    uint32_t vendor_id, vendor_part_id, hardware_version;
    int max_qp, max_qp_wr;
    uint32_t capabilities;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
    int others[20];  // limits of what is not used here
    uint16_t max_pkeys;
    uint8_t ack_delay, port_count;
};

enum PortState : uint32_t { kPortActive = 4 };
enum LinkLayer : uint8_t { kInfiniband = 1, kEthernet = 2 };

struct PortAttr {
    uint32_t state, max_mtu, active_mtu;  // an MTU is 128 << its number
    int gid_count;
    uint32_t capabilities, max_message_nbytes, bad_pkeys, bad_qkeys;
    uint16_t pkey_count, lid, manager_lid;
    uint8_t lid_mask_bits, max_lanes, manager_level, subnet_timeout, init_type, active_width, active_speed;
    uint8_t physical_state, link_layer, flags;
    uint16_t capabilities2;
};

struct Gid {
    uint8_t raw[16];
};
static_assert(sizeof(Gid) == 16);

struct GlobalRoute {
    alignas(8) Gid destination;
    uint32_t flow_label;
    uint8_t gid_index, hop_limit, traffic_class;
};

struct Address {
    GlobalRoute route;
    uint16_t lid;
    uint8_t service_level, path_bits, static_rate, is_global, port;
};

struct QpCap {
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_nbytes;
};

struct QpInit {
    void *qp_context;
    Cq *send_cq, *recv_cq;
    void *srq;
    QpCap cap;
    uint32_t type;
    int all_signaled;
};

struct QpAttr {
    uint32_t state, current_state, path_mtu, migration, qkey, receive_psn, send_psn, remote_qp, access;
    QpCap cap;
    Address address, alternative;
    uint16_t pkey_index, alternative_pkey;
    uint8_t drain_notify, draining, max_reads, max_reads_served, min_rnr_timer, port, timeout, retries, rnr_retries;
    uint8_t alternative_port, alternative_timeout;
    uint32_t rate_limit;
};
// Which attributes a change of state sets.
constexpr int kSetState = 1 << 0, kSetAccess = 1 << 3, kSetPkey = 1 << 4, kSetPort = 1 << 5, kSetAddress = 1 << 7,
              kSetMtu = 1 << 8, kSetTimeout = 1 << 9, kSetRetries = 1 << 10, kSetRnrRetries = 1 << 11,
              kSetReceivePsn = 1 << 12, kSetMaxReads = 1 << 13, kSetMinRnrTimer = 1 << 15, kSetSendPsn = 1 << 16,
              kSetMaxReadsServed = 1 << 17, kSetRemoteQp = 1 << 20;

constexpr int kLocalWrite = 1 << 0, kRemoteWrite = 1 << 1, kRemoteRead = 1 << 2;

enum EventType : uint32_t {
    kCqError = 0, kQpFatal = 1, kQpRequestError = 2, kQpAccessError = 3, kDeviceFatal = 8
};

struct Event {
    union {
        Cq *cq;
        Qp *qp;
        int port;
    };
    uint32_t type;
};

// The library's functions, under its names without "ibv_".
struct Functions {
    Device **(*get_device_list)(int *count);
    void (*free_device_list)(Device **);
    const char *(*get_device_name)(Device *);
    Context *(*open_device)(Device *);
    int (*close_device)(Context *);
    int (*query_device)(Context *, DeviceAttr *);
    int (*query_port)(Context *, uint8_t port, PortAttr *);
    int (*query_gid)(Context *, uint8_t port, int index, Gid *);
    Pd *(*alloc_pd)(Context *);
    int (*dealloc_pd)(Pd *);
    Mr *(*reg_mr)(Pd *, void *addr, size_t length, int access);
    int (*dereg_mr)(Mr *);
    // Null before rdma-core 34.
    Mr *(*reg_dmabuf_mr)(Pd *, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
    Channel *(*create_comp_channel)(Context *);
    int (*destroy_comp_channel)(Channel *);
    Cq *(*create_cq)(Context *, int count, void *cq_context, Channel *, int vector);
    int (*destroy_cq)(Cq *);
    int (*get_cq_event)(Channel *, Cq **, void **cq_context);
    void (*ack_cq_events)(Cq *, unsigned count);
    Qp *(*create_qp)(Pd *, QpInit *);
    int (*modify_qp)(Qp *, QpAttr *, int mask);
    int (*destroy_qp)(Qp *);
    int (*get_async_event)(Context *, Event *);
    void (*ack_async_event)(Event *);
    const char *(*wc_status_str)(uint32_t status);
    const char *(*event_type_str)(uint32_t type);
    int (*fork_init)();
    int (*is_fork_initialized)();  // null before rdma-core 35
};

// Throws Error(Wire) where the library is missing, with what to install. Asks the library once for memory that may
// be forked, before any is registered.
const Functions &load();

}  // namespace hdma::ibv
