// Compiles where our declarations of libibverbs are those of its header, field by field.
#include <infiniband/verbs.h>

#include "../../csrc/wire/ibverbs.h"

using namespace hdma;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ibv::ours) == sizeof(theirs))
#define SAME(ours, field, theirs, their_field)                                                  \
    static_assert(offsetof(ibv::ours, field) == offsetof(theirs, their_field) &&                \
                  sizeof(ibv::ours::field) == sizeof(theirs::their_field))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<int>(ibv::ours) == static_cast<int>(theirs))

SAME(Pd, context, ibv_pd, context);
SAME(Channel, fd, ibv_comp_channel, fd);
SAME(Cq, context, ibv_cq, context);
SAME_SIZE(Mr, ibv_mr);
SAME(Mr, addr, ibv_mr, addr);
SAME(Mr, length, ibv_mr, length);
SAME(Mr, lkey, ibv_mr, lkey);
SAME(Mr, rkey, ibv_mr, rkey);
SAME(Qp, context, ibv_qp, context);
SAME(Qp, qp_num, ibv_qp, qp_num);
SAME_VALUE(kInit, IBV_QPS_INIT);
SAME_VALUE(kReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(kReadyToSend, IBV_QPS_RTS);
SAME_VALUE(kError, IBV_QPS_ERR);
SAME_VALUE(kReliable, IBV_QPT_RC);

SAME_SIZE(Completion, ibv_wc);
SAME(Completion, wr_id, ibv_wc, wr_id);
SAME(Completion, status, ibv_wc, status);
SAME(Completion, opcode, ibv_wc, opcode);
SAME(Completion, vendor_error, ibv_wc, vendor_err);
SAME(Completion, nbytes, ibv_wc, byte_len);
SAME(Completion, immediate, ibv_wc, imm_data);
SAME(Completion, qp_num, ibv_wc, qp_num);
SAME(Completion, source_lid, ibv_wc, slid);
SAME_VALUE(kSuccess, IBV_WC_SUCCESS);
SAME_VALUE(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kRemoteAccess, IBV_WC_REM_ACCESS_ERR);
SAME_VALUE(kRetriesExceeded, IBV_WC_RETRY_EXC_ERR);

SAME_SIZE(Piece, ibv_sge);
SAME(Piece, addr, ibv_sge, addr);
SAME(Piece, nbytes, ibv_sge, length);
SAME(Piece, lkey, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME(SendRequest, wr_id, ibv_send_wr, wr_id);
SAME(SendRequest, next, ibv_send_wr, next);
SAME(SendRequest, pieces, ibv_send_wr, sg_list);
SAME(SendRequest, piece_count, ibv_send_wr, num_sge);
SAME(SendRequest, opcode, ibv_send_wr, opcode);
SAME(SendRequest, flags, ibv_send_wr, send_flags);
SAME(SendRequest, immediate, ibv_send_wr, imm_data);
SAME(SendRequest, remote.addr, ibv_send_wr, wr.rdma.remote_addr);
SAME(SendRequest, remote.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME(ReceiveRequest, next, ibv_recv_wr, next);
SAME(ReceiveRequest, pieces, ibv_recv_wr, sg_list);
SAME(ReceiveRequest, piece_count, ibv_recv_wr, num_sge);
SAME_VALUE(kWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kSend, IBV_WR_SEND);
SAME_VALUE(kRead, IBV_WR_RDMA_READ);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);
SAME_VALUE(kInline, IBV_SEND_INLINE);

SAME_SIZE(ContextOps, ibv_context_ops);
SAME(ContextOps, poll_cq, ibv_context_ops, poll_cq);
SAME(ContextOps, req_notify_cq, ibv_context_ops, req_notify_cq);
SAME(ContextOps, post_send, ibv_context_ops, post_send);
SAME(ContextOps, post_recv, ibv_context_ops, post_recv);
SAME_SIZE(Context, ibv_context);
SAME(Context, ops, ibv_context, ops);
SAME(Context, cmd_fd, ibv_context, cmd_fd);
SAME(Context, async_fd, ibv_context, async_fd);

SAME_SIZE(DeviceAttr, ibv_device_attr);
SAME(DeviceAttr, firmware, ibv_device_attr, fw_ver);
SAME(DeviceAttr, max_mr_size, ibv_device_attr, max_mr_size);
SAME(DeviceAttr, max_qp, ibv_device_attr, max_qp);
SAME(DeviceAttr, max_qp_wr, ibv_device_attr, max_qp_wr);
SAME(DeviceAttr, max_cqe, ibv_device_attr, max_cqe);
SAME(DeviceAttr, max_pkeys, ibv_device_attr, max_pkeys);
SAME(DeviceAttr, port_count, ibv_device_attr, phys_port_cnt);
SAME_SIZE(PortAttr, ibv_port_attr);
SAME(PortAttr, state, ibv_port_attr, state);
SAME(PortAttr, active_mtu, ibv_port_attr, active_mtu);
SAME(PortAttr, max_message_nbytes, ibv_port_attr, max_msg_sz);
SAME(PortAttr, lid, ibv_port_attr, lid);
SAME(PortAttr, link_layer, ibv_port_attr, link_layer);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kInfiniband, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kEthernet, IBV_LINK_LAYER_ETHERNET);

SAME_SIZE(Gid, ibv_gid);
SAME_SIZE(GlobalRoute, ibv_global_route);
SAME(GlobalRoute, destination, ibv_global_route, dgid);
SAME(GlobalRoute, gid_index, ibv_global_route, sgid_index);
SAME(GlobalRoute, hop_limit, ibv_global_route, hop_limit);
SAME(GlobalRoute, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(Address, ibv_ah_attr);
SAME(Address, lid, ibv_ah_attr, dlid);
SAME(Address, service_level, ibv_ah_attr, sl);
SAME(Address, is_global, ibv_ah_attr, is_global);
SAME(Address, port, ibv_ah_attr, port_num);
SAME_SIZE(QpCap, ibv_qp_cap);
SAME(QpCap, max_recv_wr, ibv_qp_cap, max_recv_wr);
SAME(QpCap, max_inline_nbytes, ibv_qp_cap, max_inline_data);
SAME_SIZE(QpInit, ibv_qp_init_attr);
SAME(QpInit, recv_cq, ibv_qp_init_attr, recv_cq);
SAME(QpInit, cap, ibv_qp_init_attr, cap);
SAME(QpInit, type, ibv_qp_init_attr, qp_type);
SAME(QpInit, all_signaled, ibv_qp_init_attr, sq_sig_all);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME(QpAttr, state, ibv_qp_attr, qp_state);
SAME(QpAttr, path_mtu, ibv_qp_attr, path_mtu);
SAME(QpAttr, receive_psn, ibv_qp_attr, rq_psn);
SAME(QpAttr, send_psn, ibv_qp_attr, sq_psn);
SAME(QpAttr, remote_qp, ibv_qp_attr, dest_qp_num);
SAME(QpAttr, access, ibv_qp_attr, qp_access_flags);
SAME(QpAttr, address, ibv_qp_attr, ah_attr);
SAME(QpAttr, pkey_index, ibv_qp_attr, pkey_index);
SAME(QpAttr, max_reads, ibv_qp_attr, max_rd_atomic);
SAME(QpAttr, max_reads_served, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME(QpAttr, port, ibv_qp_attr, port_num);
SAME(QpAttr, timeout, ibv_qp_attr, timeout);
SAME(QpAttr, retries, ibv_qp_attr, retry_cnt);
SAME(QpAttr, rnr_retries, ibv_qp_attr, rnr_retry);
SAME_VALUE(kSetState, IBV_QP_STATE);
SAME_VALUE(kSetAccess, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kSetPkey, IBV_QP_PKEY_INDEX);
SAME_VALUE(kSetPort, IBV_QP_PORT);
SAME_VALUE(kSetAddress, IBV_QP_AV);
SAME_VALUE(kSetMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kSetTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kSetRetries, IBV_QP_RETRY_CNT);
SAME_VALUE(kSetRnrRetries, IBV_QP_RNR_RETRY);
SAME_VALUE(kSetReceivePsn, IBV_QP_RQ_PSN);
SAME_VALUE(kSetMaxReads, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kSetMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kSetSendPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kSetMaxReadsServed, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kSetRemoteQp, IBV_QP_DEST_QPN);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kRemoteRead, IBV_ACCESS_REMOTE_READ);

SAME_SIZE(Event, ibv_async_event);
SAME(Event, type, ibv_async_event, event_type);
SAME_VALUE(kCqError, IBV_EVENT_CQ_ERR);
SAME_VALUE(kQpFatal, IBV_EVENT_QP_FATAL);
SAME_VALUE(kQpRequestError, IBV_EVENT_QP_REQ_ERR);
SAME_VALUE(kQpAccessError, IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(kDeviceFatal, IBV_EVENT_DEVICE_FATAL);

int main() {}
