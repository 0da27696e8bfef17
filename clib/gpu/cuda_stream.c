/*
 * Copies, streams and events. Everything is queued in streams of the backend. The default stream of a context waits for
 * the streams that block before it does something, and the caller waits for it: so it never has anything left to do.
 */
#include "cuda_state.h"

/* Streams and events. */

/* enter enters a stream or an event, which destroy destroys, in its table. */
static CUresult enter(struct table *t, struct context *c, unsigned int flags, uint64_t handle, int (*destroy)(uint64_t), uintptr_t *key)
{
	struct item *i = calloc(1, sizeof *i);
	pthread_mutex_lock(&vcu_lock);
	if (i)
		*i = (struct item){.row.key = vcu_number(), .ctx = c, .flags = flags, .handle = handle};
	bool in = i && !c->destroyed && vcu_add(t, &i->row);
	if (in)
		*key = i->row.key;
	pthread_mutex_unlock(&vcu_lock);
	if (in)
		return CUDA_SUCCESS;
	destroy(handle);
	free(i);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* look finds a stream or an event. */
static CUresult look(const struct table *t, uintptr_t key, struct item *found)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	struct item *i = (struct item *)vcu_find(t, key);
	if (i)
		*found = *i;
	pthread_mutex_unlock(&vcu_lock);
	return i ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* leave destroys a stream or an event. */
static CUresult leave(struct table *t, uintptr_t key, int (*destroy)(uint64_t))
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	struct item *i = (struct item *)vcu_find(t, key);
	if (i)
		vcu_remove(t, &i->row);
	pthread_mutex_unlock(&vcu_lock);
	if (!i)
		return CUDA_ERROR_INVALID_HANDLE;
	destroy(i->handle); /* errors of operations have no reader any more */
	free(i);
	return CUDA_SUCCESS;
}

/* Streams. */

/* lane is where a call queues its operation. */
struct lane {
	struct context *ctx;
	uint64_t handle;
	bool waits; /* the caller waits until the operation is done */
};

static bool is_default(CUstream s) { return !s || s == CU_STREAM_LEGACY || s == CU_STREAM_PER_THREAD; }

CUresult vcu_drain(struct context *c, bool all)
{
	CUresult first = CUDA_SUCCESS;
	pthread_mutex_lock(&vcu_lock);
	uint64_t *handles = malloc((vcu_streams.n + 1) * sizeof *handles);
	size_t n = 0;
	for (size_t i = 0; handles && i < vcu_streams.n; i++) {
		struct item *s = (struct item *)vcu_streams.rows[i];
		if (s->ctx == c && (all || !(s->flags & CU_STREAM_NON_BLOCKING)))
			handles[n++] = s->handle;
	}
	pthread_mutex_unlock(&vcu_lock);
	if (!handles)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t i = 0; i < n; i++) {
		int e = verbena_gpu_stream_sync(handles[i]);
		if (e && e != -EINVAL && !first) /* EINVAL: another thread has destroyed the stream meanwhile */
			first = vcu_result(e);
	}
	free(handles);
	return first;
}

/* choose finds out where an operation goes. */
static CUresult choose(CUstream stream, struct lane *l)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	if (is_default(stream)) {
		if ((r = vcu_current(&l->ctx)) == CUDA_SUCCESS) {
			l->handle = l->ctx->stream;
			l->waits = true;
		}
		return r;
	}
	struct item i = {0};
	if ((r = look(&vcu_streams, (uintptr_t)stream, &i)) == CUDA_SUCCESS)
		*l = (struct lane){.ctx = i.ctx, .handle = i.handle};
	return r;
}

/* before is called before an operation is queued, and after when it was. */
static CUresult before(const struct lane *l) { return l->waits ? vcu_drain(l->ctx, false) : CUDA_SUCCESS; }

static CUresult after(const struct lane *l, int queued)
{
	return vcu_result(queued < 0 || !l->waits ? queued : verbena_gpu_stream_sync(l->handle));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
	struct context *c;
	uint64_t handle = 0;
	uintptr_t key = 0;
	CUresult r = vcu_current(&c);
	(void)priority; /* a number outside the range is made the nearest one, and there is one only */
	if (r || !stream || flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	int e = verbena_gpu_stream_create(c->dev, &handle);
	if (e < 0)
		return vcu_result(e);
	if ((r = enter(&vcu_streams, c, flags, handle, verbena_gpu_stream_destroy, &key)) == CUDA_SUCCESS)
		*stream = (CUstream)key;
	return r;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuStreamDestroy(CUstream stream) { return leave(&vcu_streams, (uintptr_t)stream, verbena_gpu_stream_destroy); }

CUresult cuStreamSynchronize(CUstream stream)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	return r || (r = before(&l)) ? r : vcu_result(verbena_gpu_stream_sync(l.handle));
}

CUresult cuStreamQuery(CUstream stream)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !l.waits)
		return r ? r : vcu_result(verbena_gpu_stream_query(l.handle));
	pthread_mutex_lock(&vcu_lock);
	for (size_t i = 0; !r && i < vcu_streams.n; i++) {
		struct item *s = (struct item *)vcu_streams.rows[i];
		if (s->ctx == l.ctx && !(s->flags & CU_STREAM_NON_BLOCKING))
			r = vcu_result(verbena_gpu_stream_query(s->handle));
	}
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *ctx)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !ctx)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*ctx = (CUcontext)l.ctx->row.key;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !flags)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	struct item i = {0}; /* of the default stream, which is in no table: CU_STREAM_DEFAULT */
	look(&vcu_streams, (uintptr_t)stream, &i);
	*flags = i.flags;
	return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !priority)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*priority = 0;
	return CUDA_SUCCESS;
}

/* A function of the program that a stream calls. */
struct call {
	CUhostFn function;	   /* it is not called after an error; or NULL */
	CUstreamCallback callback; /* it gets the error; or NULL */
	CUstream stream;
	void *data;
};

static void do_call(void *arg, int error)
{
	struct call c = *(struct call *)arg;
	free(arg);
	if (c.callback)
		c.callback(c.stream, vcu_result(error), c.data);
	else if (error >= 0)
		c.function(c.data);
}

static CUresult queue_call(struct call c)
{
	struct lane l = {0};
	CUresult r = choose(c.stream, &l);
	if (r || (r = before(&l)))
		return r;
	struct call *arg = malloc(sizeof *arg);
	if (!arg)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*arg = c;
	int e = verbena_gpu_stream_call(l.handle, do_call, arg);
	if (e < 0)
		free(arg);
	return after(&l, e);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
	return function ? queue_call((struct call){.function = function, .stream = stream, .data = data})
			: CUDA_ERROR_INVALID_VALUE;
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags)
{
	return callback && !flags ? queue_call((struct call){.callback = callback, .stream = stream, .data = data})
				  : CUDA_ERROR_INVALID_VALUE;
}

/* Copies. */

enum place { UNKNOWN, INSIDE, BEYOND };

/* place reports how a range and the memory that the table has lie. */
static enum place place(uintptr_t addr, size_t n)
{
	enum place p = UNKNOWN;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = (struct memory *)vcu_floor(&vcu_memory, addr);
	if (m && addr - m->row.key < m->size)
		p = n <= m->size - (addr - m->row.key) ? INSIDE : BEYOND;
	pthread_mutex_unlock(&vcu_lock);
	return p;
}

/* copy is all functions that copy. toGPU and fromGPU: that side has to be memory of CUDA's. The other memory is the
 * program's, which the caller may change after the call: such a copy is waited for. */
static CUresult copy(uintptr_t to, bool toGPU, uintptr_t from, bool fromGPU, size_t n, CUstream stream)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !n)
		return r;
	if (!to || !from || n > UINTPTR_MAX - to || n > UINTPTR_MAX - from)
		return CUDA_ERROR_INVALID_VALUE;
	enum place dst = place(to, n), src = place(from, n);
	if (dst == BEYOND || src == BEYOND || (toGPU && dst != INSIDE) || (fromGPU && src != INSIDE))
		return CUDA_ERROR_INVALID_VALUE;
	if ((r = before(&l)))
		return r;
	l.waits |= dst == UNKNOWN || src == UNKNOWN;
	return after(&l, verbena_gpu_stream_copy(l.handle, (void *)to, (const void *)from, n));
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy(to, false, from, false, n, NULL); }

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream)
{
	return copy(to, false, from, false, n, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n, CUstream stream)
{
	return copy(to, true, (uintptr_t)from, false, n, stream);
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n, CUstream stream)
{
	return copy((uintptr_t)to, false, from, true, n, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream)
{
	return copy(to, true, from, true, n, stream);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n) { return cuMemcpyHtoDAsync(to, from, n, NULL); }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) { return cuMemcpyDtoHAsync(to, from, n, NULL); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t n) { return cuMemcpyDtoDAsync(to, from, n, NULL); }

/* An address says whose memory it is: the contexts are of no use. */
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext toCtx, CUdeviceptr from, CUcontext fromCtx, size_t n, CUstream stream)
{
	return toCtx && fromCtx ? cuMemcpyDtoDAsync(to, from, n, stream) : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext toCtx, CUdeviceptr from, CUcontext fromCtx, size_t n)
{
	return cuMemcpyPeerAsync(to, toCtx, from, fromCtx, n, NULL);
}

/* fill is all functions that set memory. */
static CUresult fill(CUdeviceptr to, uint32_t value, uint32_t width, size_t count, CUstream stream)
{
	struct lane l = {0};
	CUresult r = choose(stream, &l);
	if (r || !count)
		return r;
	if (to % width || count > SIZE_MAX / width || place(to, count * width) != INSIDE)
		return CUDA_ERROR_INVALID_VALUE;
	if ((r = before(&l)))
		return r;
	return after(&l, verbena_gpu_stream_fill(l.handle, (void *)(uintptr_t)to, value, width, count));
}

CUresult cuMemsetD8(CUdeviceptr to, unsigned char v, size_t n) { return fill(to, v, 1, n, NULL); }
CUresult cuMemsetD16(CUdeviceptr to, unsigned short v, size_t n) { return fill(to, v, 2, n, NULL); }
CUresult cuMemsetD32(CUdeviceptr to, unsigned int v, size_t n) { return fill(to, v, 4, n, NULL); }
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char v, size_t n, CUstream s) { return fill(to, v, 1, n, s); }
CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short v, size_t n, CUstream s) { return fill(to, v, 2, n, s); }
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int v, size_t n, CUstream s) { return fill(to, v, 4, n, s); }

/* Events. */

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
	struct context *c;
	uint64_t handle = 0;
	uintptr_t key = 0;
	CUresult r = vcu_current(&c);
	if (r || !event || flags & ~(unsigned int)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS))
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if (flags & CU_EVENT_INTERPROCESS)
		return CUDA_ERROR_NOT_SUPPORTED;
	int e = verbena_gpu_event_create(&handle);
	if (e < 0)
		return vcu_result(e);
	if ((r = enter(&vcu_events, c, flags, handle, verbena_gpu_event_destroy, &key)) == CUDA_SUCCESS)
		*event = (CUevent)key;
	return r;
}

/* of finds an event. */
static CUresult of(CUevent event, struct item *found) { return look(&vcu_events, (uintptr_t)event, found); }

CUresult cuEventDestroy(CUevent event) { return leave(&vcu_events, (uintptr_t)event, verbena_gpu_event_destroy); }

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	struct item e;
	struct lane l = {0};
	CUresult r = of(event, &e);
	if (r || (r = choose(stream, &l)))
		return r;
	if (e.ctx != l.ctx)
		return CUDA_ERROR_INVALID_HANDLE;
	return (r = before(&l)) ? r : after(&l, verbena_gpu_event_record(e.handle, l.handle));
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	struct item e;
	struct lane l = {0};
	if (flags & ~1U)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = of(event, &e);
	if (r || (r = choose(stream, &l)) || (r = before(&l)))
		return r;
	return after(&l, verbena_gpu_event_wait(e.handle, l.handle));
}

CUresult cuEventSynchronize(CUevent event)
{
	struct item e;
	CUresult r = of(event, &e);
	return r ? r : vcu_result(verbena_gpu_event_sync(e.handle));
}

CUresult cuEventQuery(CUevent event)
{
	struct item e;
	CUresult r = of(event, &e);
	return r ? r : vcu_result(verbena_gpu_event_query(e.handle));
}

CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
	struct item a, b;
	int64_t ns = 0;
	CUresult r = of(from, &a);
	if (r || (r = of(to, &b)) || !ms)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if ((a.flags | b.flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	int e = verbena_gpu_event_elapsed(a.handle, b.handle, &ns);
	if (e < 0)
		return e == -EINVAL ? CUDA_ERROR_INVALID_HANDLE : vcu_result(e);
	*ms = (float)((double)ns / 1e6);
	return CUDA_SUCCESS;
}
