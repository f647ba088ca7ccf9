#include "simulate/fleet.h"

#include <stdio.h>
#include <sys/mman.h>

#include "agent/agent.h"
#include "simulate/fabric.h"
#include "simulate/network.h"

void kvf_world_fail(kvf_world *world, kvf_status status) {
    if (world->status)
        return;
    world->status = status;
    (void)snprintf(world->detail, sizeof world->detail, "%s", kvf_error_detail());
}

/* ---- a host's turns -------------------------------------------------------------------------- */

static void take_turn(kvf_happening *happening) {
    kvf_host *host = (kvf_host *)((char *)happening - offsetof(kvf_host, turn));
    const kvf_fleet_engine *engine = host->owner;
    kvf_event event = {.struct_size = sizeof event};
    bool busy = false;
    (void)kvf_agent_progress(host->agent, &busy);
    while (kvf_agent_next_event(host->agent, &event) == KVF_OK)
        engine->fleet->event(host, &event);
    const uint64_t left = busy ? 0 : kvf_agent_timeout(host->agent);
    kvf_happening_by(&host->world->line, &host->turn, kvf_add_or_most(host->world->line.now, left));
}

static kvf_status start_rank(kvf_fleet_engine *engine, uint32_t rank) {
    const kvf_fleet *fleet = engine->fleet;
    kvf_host *host = &engine->hosts[rank];
    kvf_world *world = fleet->world;
    world->opening = host;
    kvf_status status = kvf_agent_open_in(&(const kvf_surroundings){.clock = &world->clock,
                                                                    .link = &kvf_modelled_network,
                                                                    .fabric = &kvf_modelled_fabric},
                                          &engine->view, rank, &fleet->agent, &host->agent);
    world->opening = NULL;
    if (!status)
        status = kvf_agent_register(host->agent, fleet->memory,
                                    kvf_shard_get(kvf_engine_shard(&engine->view, rank))->region_count);
    if (!status)
        kvf_host_wake(host);
    return status;
}

static kvf_status introduce(kvf_fleet_engine *engine) {
    kvf_status status = KVF_OK;
    for (uint32_t r = 1; r < engine->fleet->rank_count && !status; r++) {
        const void *bytes;
        size_t size;
        status = kvf_agent_introduction(engine->hosts[r].agent, &bytes, &size);
        if (!status)
            status = kvf_agent_introduce(engine->hosts[0].agent, bytes, size);
    }
    return status;
}

static void free_all_blocks(kvf_fleet_engine *engine) {
    for (uint32_t p = 0; p < engine->fleet->pool_count; p++) {
        kvf_block_pool *pool = &engine->pools[p];
        pool->free_count = pool->all;
        for (uint32_t b = 0; b < pool->all; b++) {
            pool->free_ids[b] = pool->all - 1 - b;
            pool->owners[b] = 0;
        }
    }
}

kvf_status kvf_engine_start(kvf_fleet_engine *engine) {
    kvf_status status = KVF_OK;
    for (uint32_t r = 0; r < engine->fleet->rank_count && !status; r++)
        status = start_rank(engine, r);
    if (!status)
        status = introduce(engine);
    free_all_blocks(engine);
    engine->load = 0;
    engine->alive = !status;
    engine->fleet->there += engine->alive;
    if (!status)
        engine->contact =
            (kvf_contact){.engine = engine->name, .endpoint = kvf_agent_endpoint(engine->hosts[0].agent)};
    return status;
}

void kvf_engine_kill(kvf_fleet_engine *engine) {
    kvf_world *world = engine->fleet->world;
    world->quiet = true;
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++) {
        kvf_host *host = &engine->hosts[r];
        kvf_agent_close(host->agent);
        host->agent = NULL;
        kvf_happening_set(&world->line, &host->turn, UINT64_MAX);
    }
    world->quiet = false;
    engine->fleet->there--;
    engine->alive = false;
}

bool kvf_engine_is_there(const kvf_fleet_engine *engine) {
    return engine->alive && !engine->cut_off;
}

static void set_cut_off(kvf_fleet_engine *engine, bool cut_off) {
    engine->cut_off = cut_off;
    engine->fleet->there += cut_off ? UINT32_MAX : 1;
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++)
        engine->hosts[r].cut_off = cut_off;
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++)
        kvf_fabric_turn(&engine->hosts[r]);
}

void kvf_engine_cut_off(kvf_fleet_engine *engine) {
    set_cut_off(engine, true);
}

void kvf_engine_join(kvf_fleet_engine *engine) {
    set_cut_off(engine, false);
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++)
        kvf_network_resume(&engine->hosts[r]);
}

void kvf_engine_break(kvf_fleet_engine *engine) {
    for (uint32_t r = 0; r < engine->fleet->rank_count; r++)
        kvf_network_break(&engine->hosts[r]);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Finds the blocks of each region, by the placements that lie in it. */
static kvf_status find_blocks(kvf_fleet *fleet, uint32_t rank) {
    const kvf_shard *shard = kvf_engine_shard(fleet->shape, rank);
    const kvf_model *model = kvf_engine_model(fleet->shape);
    const kvf_shard_desc *desc = kvf_shard_get(shard);
    kvf_region_blocks *regions = kvf_alloc0(desc->region_count, sizeof *regions);
    if (!regions)
        return kvf_nomem("a simulation");
    fleet->regions[rank] = regions;
    for (uint32_t g = 0; g < fleet->group_count; g++) {
        const kvf_group_shard_desc *group = &desc->groups[g];
        const kvf_range layers = kvf_shard_group_layers(shard, g);
        for (uint32_t l = layers.begin; l < layers.end; l++)
            for (uint32_t p = 0; p < kvf_model_group(model, g)->part_count; p++) {
                const kvf_placement *at = kvf_shard_placement(shard, g, l, p);
                if (at && group->parts[p].units.begin < group->parts[p].units.end)
                    regions[at->region] =
                        (kvf_region_blocks){.pool = fleet->pool_count > 1 ? g : 0,
                                            .stride = at->block_stride,
                                            .count = group->block_count * group->kernel_blocks_per_block,
                                            .per_block = group->kernel_blocks_per_block};
            }
    }
    return KVF_OK;
}

/* Addresses for the largest regions of any rank. Nothing is behind them, and all ranks have the same. */
static kvf_status reserve_memory(kvf_fleet *fleet) {
    for (uint32_t r = 0; r < fleet->rank_count; r++)
        fleet->region_most = (uint32_t)kvf_max_u64(
            fleet->region_most, kvf_shard_get(kvf_engine_shard(fleet->shape, r))->region_count);
    fleet->memory = kvf_alloc0(fleet->region_most, sizeof *fleet->memory);
    if (!fleet->memory)
        return kvf_nomem("a simulation");
    for (uint32_t i = 0; i < fleet->region_most; i++) {
        uint64_t bytes = 1;
        for (uint32_t r = 0; r < fleet->rank_count; r++) {
            const kvf_shard_desc *desc = kvf_shard_get(kvf_engine_shard(fleet->shape, r));
            bytes = kvf_max_u64(bytes, i < desc->region_count ? desc->region_bytes[i] : 0);
        }
        void *address = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (address == MAP_FAILED)
            return kvf_fail(KVF_E_NOMEM, "%s engines: no addresses for a region of %llu bytes", fleet->role,
                            (unsigned long long)bytes);
        fleet->memory[i] =
            (kvf_memory){.struct_size = sizeof *fleet->memory, .address = address, .bytes = bytes};
    }
    return KVF_OK;
}

static kvf_status make_pools(kvf_fleet_engine *engine) {
    const kvf_shard_desc *desc = kvf_shard_get(kvf_engine_shard(engine->fleet->shape, 0));
    engine->pools = kvf_alloc0(engine->fleet->pool_count, sizeof *engine->pools);
    for (uint32_t p = 0; engine->pools && p < engine->fleet->pool_count; p++) {
        kvf_block_pool *pool = &engine->pools[p];
        if (desc->groups[p].block_count > UINT32_MAX)
            return kvf_fail(KVF_E_RANGE, "%s engines: %llu blocks; allowed: up to 2^32 - 1",
                            engine->fleet->role, (unsigned long long)desc->groups[p].block_count);
        pool->all = (uint32_t)desc->groups[p].block_count;
        pool->free_ids = kvf_alloc(pool->all, sizeof *pool->free_ids);
        pool->owners = kvf_alloc0(pool->all, sizeof *pool->owners);
        if (!pool->free_ids || !pool->owners)
            return kvf_nomem("a simulation");
    }
    return engine->pools ? KVF_OK : kvf_nomem("a simulation");
}

static kvf_status make_engine(kvf_fleet *fleet, uint32_t i) {
    kvf_fleet_engine *engine = &fleet->engines[i];
    engine->fleet = fleet;
    (void)snprintf(engine->name, sizeof engine->name, "%s-%u", fleet->role, i);
    engine->view = *fleet->shape;
    engine->view.name = engine->name;
    engine->hosts = kvf_alloc0(fleet->rank_count, sizeof *engine->hosts);
    kvf_status status = engine->hosts ? make_pools(engine) : kvf_nomem("a simulation");
    for (uint32_t r = 0; r < fleet->rank_count && !status; r++) {
        engine->hosts[r] = (kvf_host){.world = fleet->world, .owner = engine, .rank = r};
        status = kvf_happening_make(&fleet->world->line, &engine->hosts[r].turn, take_turn);
    }
    return status ? status : kvf_engine_start(engine);
}

static bool shares_tokens(const kvf_engine *shape) {
    const kvf_shard_desc *first = kvf_shard_get(kvf_engine_shard(shape, 0));
    bool shares = false;
    for (uint32_t g = 0; g < kvf_model_group_count(kvf_engine_model(shape)); g++)
        shares = shares || first->groups[g].tokens.count > 1;
    return shares;
}

static kvf_status check_role(const char *role, const kvf_simulated_role *spec) {
    kvf_status status = kvf_check_reserved(spec->reserved, 2, role);
    if (status)
        return status;
    if (!spec->shape)
        return kvf_fail(KVF_E_INVALID, "%s.shape is NULL", role);
    if (spec->engine_count == 0)
        return kvf_fail(KVF_E_RANGE, "%s.engine_count is 0; allowed: 1 and more", role);
    if (shares_tokens(spec->shape))
        return kvf_fail(KVF_E_UNSUPPORTED,
                        "%s.shape has ranks that share tokens; allowed in a simulation: dcp_size 1", role);
    if (!(spec->tokens_per_second >= 0))
        return kvf_fail(KVF_E_RANGE, "%s.tokens_per_second is %g; allowed: 0 and more", role,
                        spec->tokens_per_second);
    return KVF_OK;
}

kvf_status kvf_fleet_open(kvf_fleet *fleet, kvf_world *world, const char *role,
                          const kvf_simulated_role *spec, const kvf_agent_options *agent) {
    kvf_status status = check_role(role, spec);
    fleet->world = world;
    fleet->role = role;
    fleet->agent = *agent;
    fleet->token_ns = spec->tokens_per_second > 0 ? 1e9 / spec->tokens_per_second : 0;
    if (status)
        return status;
    fleet->shape = spec->shape;
    fleet->rank_count = kvf_engine_rank_count(fleet->shape);
    fleet->group_count = kvf_model_group_count(kvf_engine_model(spec->shape));
    fleet->pool_count = spec->share_pages ? 1 : fleet->group_count;
    fleet->regions = kvf_alloc0(fleet->rank_count, sizeof *fleet->regions);
    fleet->engines = kvf_alloc0(spec->engine_count, sizeof *fleet->engines);
    if (!fleet->regions || !fleet->engines)
        return kvf_nomem("a simulation");
    for (uint32_t r = 0; r < fleet->rank_count && !status; r++)
        status = find_blocks(fleet, r);
    if (!status)
        status = reserve_memory(fleet);
    while (fleet->engine_count < spec->engine_count && !status)
        status = make_engine(fleet, fleet->engine_count++);
    return status;
}

static void free_engine(kvf_fleet_engine *engine) {
    kvf_timeline *line = &engine->fleet->world->line;
    for (uint32_t r = 0; engine->hosts && r < engine->fleet->rank_count; r++) {
        kvf_agent_close(engine->hosts[r].agent);
        kvf_happening_drop(line, &engine->hosts[r].turn);
    }
    for (uint32_t p = 0; engine->pools && p < engine->fleet->pool_count; p++) {
        kvf_free(engine->pools[p].free_ids);
        kvf_free(engine->pools[p].owners);
    }
    kvf_happening_drop(line, &engine->happening);
    kvf_happening_drop(line, &engine->returning);
    kvf_free(engine->pools);
    kvf_free(engine->hosts);
}

void kvf_fleet_close(kvf_fleet *fleet) {
    for (uint32_t i = 0; i < fleet->engine_count; i++)
        free_engine(&fleet->engines[i]);
    for (uint32_t i = 0; fleet->memory && i < fleet->region_most; i++)
        if (fleet->memory[i].address)
            (void)munmap(fleet->memory[i].address, fleet->memory[i].bytes);
    for (uint32_t r = 0; fleet->regions && r < fleet->rank_count; r++)
        kvf_free(fleet->regions[r]);
    kvf_free(fleet->memory);
    kvf_free(fleet->regions);
    kvf_free(fleet->engines);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The blocks of a request in a group: the first that is needed, and one past the last. */
static kvf_range blocks_of(const kvf_fleet *fleet, uint32_t g, uint64_t tokens) {
    const kvf_group_desc *group = kvf_model_group(kvf_engine_model(fleet->shape), g);
    const kvf_group_shard_desc *desc = &kvf_shard_get(kvf_engine_shard(fleet->shape, 0))->groups[g];
    const uint64_t steps = kvf_group_step_count(group, tokens);
    const uint64_t per_block = desc->tokens_per_block / group->tokens_per_step;
    return (kvf_range){(uint32_t)(kvf_group_first_needed(group, steps) / per_block),
                       (uint32_t)((steps + per_block - 1) / per_block)};
}

uint32_t kvf_fleet_blocks(const kvf_fleet *fleet, uint32_t group, uint64_t tokens) {
    const kvf_range blocks = blocks_of(fleet, group, tokens);
    return blocks.end - blocks.begin;
}

static kvf_block_pool *pool_of(const kvf_fleet_engine *engine, uint32_t group) {
    return &engine->pools[engine->fleet->pool_count > 1 ? group : 0];
}

static bool has_room(const kvf_fleet_engine *engine, uint64_t tokens) {
    uint64_t all = 0;
    for (uint32_t g = 0; g < engine->fleet->group_count; g++) {
        const uint64_t wanted = kvf_fleet_blocks(engine->fleet, g, tokens);
        all += wanted;
        if ((engine->fleet->pool_count > 1 ? wanted : all) > pool_of(engine, g)->free_count)
            return false;
    }
    return true;
}

bool kvf_engine_take_blocks(kvf_fleet_engine *engine, uint32_t owner, uint64_t tokens, kvf_group_steps *steps,
                            uint32_t *ids) {
    const kvf_model *model = kvf_engine_model(engine->fleet->shape);
    if (!has_room(engine, tokens))
        return false;
    for (uint32_t g = 0; g < engine->fleet->group_count; g++) {
        const kvf_range blocks = blocks_of(engine->fleet, g, tokens);
        kvf_block_pool *pool = pool_of(engine, g);
        steps[g] =
            (kvf_group_steps){{.ids = ids, .count = blocks.end - blocks.begin, .first_block = blocks.begin},
                              0,
                              kvf_group_step_count(kvf_model_group(model, g), tokens)};
        for (uint32_t b = blocks.begin; b < blocks.end; b++) {
            *ids = pool->free_ids[--pool->free_count];
            pool->owners[*ids++] = owner;
        }
    }
    return true;
}

void kvf_engine_give_blocks(kvf_fleet_engine *engine, const kvf_group_steps *steps) {
    for (uint32_t g = 0; g < engine->fleet->group_count; g++) {
        kvf_block_pool *pool = pool_of(engine, g);
        for (uint32_t i = 0; i < steps[g].table.count; i++) {
            const uint32_t id = steps[g].table.ids[i];
            pool->owners[id] = 0;
            pool->free_ids[pool->free_count++] = id;
        }
    }
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* The request that has all the blocks of a run; 0: there is none. */
static uint32_t owner_of(const kvf_host *host, uint32_t region, uint64_t offset, uint64_t bytes) {
    const kvf_fleet_engine *engine = host->owner;
    const kvf_region_blocks *at = &engine->fleet->regions[host->rank][region];
    const kvf_block_pool *pool = &engine->pools[at->pool];
    uint32_t owner = pool->owners[offset / at->stride % at->count / at->per_block];
    for (uint64_t i = offset / at->stride + 1; i <= (offset + bytes - 1) / at->stride; i++)
        owner = pool->owners[i % at->count / at->per_block] == owner ? owner : 0;
    return owner;
}

kvf_run_owners kvf_run_owners_of(const kvf_host *mover, const kvf_host *owner, const kvf_run *runs,
                                 size_t count) {
    kvf_run_owners found = {0};
    for (size_t i = 0; i < count; i++) {
        const kvf_run *run = &runs[i];
        const uint32_t here = owner_of(mover, run->local_region, run->local_offset, run->bytes);
        found.request = i > 0 ? found.request : here;
        if (here == 0)
            found.astray++;
        else if (here != owner_of(owner, run->remote_region, run->remote_offset, run->bytes))
            found.unlike++;
    }
    return found;
}

uint64_t kvf_engine_left(const kvf_fleet_engine *engine) {
    uint64_t left = 0;
    for (uint32_t r = 0; r < engine->fleet->rank_count && engine->alive; r++) {
        kvf_agent_stats s = {.struct_size = sizeof s};
        (void)kvf_agent_get_stats(engine->hosts[r].agent, &s);
        left += s.leases_now + s.blocks_held_now + s.blocks_filling_now + s.blocks_in_doubt_now;
        for (uint32_t k = 0; k < KVF_REQUEST_KINDS; k++)
            left += s.requests_now[k];
    }
    return left;
}
