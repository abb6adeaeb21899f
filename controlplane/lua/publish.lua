-- Makes a snapshot the current one and announces it, if the lease is ours. A lease that ran out while
-- we were slow counts as ours still where nobody has published since.
-- ARGV: prefix, replica id, snapshot, sequence, roster version, roster digest
local prefix, me = ARGV[1], ARGV[2]
local owner = redis.call('GET', prefix .. 'snapshot:publisher')
if owner and owner ~= me then
  return 0
end
local last = redis.call('HGET', prefix .. 'snapshot:state', 'sequence')
if last and tonumber(last) >= tonumber(ARGV[4]) then
  return 0
end
local time = redis.call('TIME')
redis.call('SET', prefix .. 'snapshot', ARGV[3])
redis.call('HSET', prefix .. 'snapshot:state', 'sequence', ARGV[4], 'publisher', me,
  'published_unix', string.format('%d.%06d', time[1], time[2]),
  'roster_version', ARGV[5], 'roster_digest', ARGV[6])
redis.call('PUBLISH', prefix .. 'snapshots', ARGV[3])
return 1
